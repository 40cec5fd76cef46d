"""Aborts that came before their request did."""

from __future__ import annotations

from collections import OrderedDict


class AbortMemory:
    """Remembers so many request ids, each for so long; the oldest go first."""

    def __init__(self, size: int, seconds: float) -> None:
        self._size = size
        self._seconds = seconds
        self._aborted_at: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._aborted_at)

    def add(self, request_id: str, now: float) -> None:
        """Remembers from now on."""
        self._aborted_at[request_id] = now
        self._aborted_at.move_to_end(request_id)
        self._prune(now)

    def contains(self, request_id: str, now: float) -> bool:
        """Whether the id was aborted a short while ago."""
        self._prune(now)
        return request_id in self._aborted_at

    def _prune(self, now: float) -> None:
        while self._aborted_at:
            request_id, aborted_at = next(iter(self._aborted_at.items()))
            if len(self._aborted_at) <= self._size and now - aborted_at < self._seconds:
                return
            del self._aborted_at[request_id]
