"""Sequences that have lost their worker, from the loss until another takes them or they fail.

Knows no connection and sends nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from worker.answers import Answer, AnswerFinished
from worker.generation import Generation
from worker.messages import FinishReason

Place = tuple[int, int]
"""A worker and its generation."""


@dataclass(slots=True)
class Orphan:
    """One sequence without a worker."""

    generation: Generation
    answer: Answer
    lost_from: Place | None
    """While it is not known whether the worker died or only the connection broke; it must not be sent
    anywhere before."""
    expiry: asyncio.TimerHandle | None = None


class Orphans:
    """By key. Ends those that wait too long: for a worker, or past their deadline."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._orphans: dict[int, Orphan] = {}

    def __len__(self) -> int:
        return len(self._orphans)

    def add(self, generation: Generation, answer: Answer, lost_from: Place) -> None:
        orphan = Orphan(generation, answer, lost_from)
        self._orphans[answer.key] = orphan
        if not answer.is_paused:
            self._start_waiting(orphan)

    def remove(self, key: int) -> Orphan | None:
        """The orphan of this key, if there is one; it waits no longer."""
        orphan = self._orphans.pop(key, None)
        if orphan is not None and orphan.expiry is not None:
            orphan.expiry.cancel()
        return orphan

    def resume(self, key: int) -> None:
        """Somebody reads again: what was paused now waits for a worker like the others."""
        orphan = self._orphans.get(key)
        if orphan is not None and orphan.expiry is None:
            self._start_waiting(orphan)

    def settle(self, place: Place, judge: Callable[[Orphan], None]) -> None:
        """It is known what became of a worker: judges each orphan that it left, in order of loss."""
        for key, orphan in list(self._orphans.items()):
            if orphan.lost_from == place and key in self._orphans:
                orphan.lost_from = None
                judge(orphan)

    def places(self, worker: int) -> set[int]:
        """Generations of a worker that orphans wait to hear of."""
        lost = (orphan.lost_from for orphan in self._orphans.values())
        return {place[1] for place in lost if place is not None and place[0] == worker}

    def take_ready(self) -> Iterator[Orphan]:
        """Those that may be sent to a worker, removed one by one as the iteration goes on."""
        for key, orphan in list(self._orphans.items()):
            if orphan.lost_from is None and not orphan.answer.is_paused and key in self._orphans:
                self.remove(key)
                yield orphan

    def fail_all(self, message: str) -> None:
        """No worker will ever come."""
        for key in list(self._orphans):
            orphan = self.remove(key)
            if orphan is not None:
                orphan.generation.end(orphan.answer, AnswerFinished(FinishReason.FAULT, message))

    def _start_waiting(self, orphan: Orphan) -> None:
        loop = asyncio.get_running_loop()
        deadline = orphan.generation.deadline
        until = loop.time() + self._wait_s
        end = AnswerFinished(FinishReason.FAULT, f"no worker came back within {self._wait_s:g} s")
        if deadline is not None and deadline < until:
            until, end = deadline, AnswerFinished(FinishReason.DEADLINE)
        orphan.expiry = loop.call_at(until, self._expire, orphan, end)

    def _expire(self, orphan: Orphan, end: AnswerFinished) -> None:
        if self._orphans.pop(orphan.answer.key, None) is not None:
            orphan.generation.end(orphan.answer, end)
