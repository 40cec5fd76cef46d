"""The sequences in line for a slot."""

from __future__ import annotations

from worker.scheduling.lazy_heap import LazyHeap
from worker.sequence import Rank, Sequence, State


class WaitingLine:
    """In order of rank: priority, then resubmissions, whose clients have part of an answer already, then
    arrival. A preempted or resumed sequence has the rank it always had.

    Some are *parked*: they stand aside until the page they want to share is computed, so that those
    behind them are not held up.
    """

    def __init__(self) -> None:
        self._heap: LazyHeap[Sequence] = LazyHeap()
        self._parked: dict[bytes, dict[Sequence, None]] = {}
        self._n_parked = 0

    def __len__(self) -> int:
        """All that wait, parked ones included."""
        return len(self._heap) + self._n_parked

    def head(self) -> Sequence | None:
        """The first that is not parked."""
        entry: tuple[Rank, Sequence] | None = self._heap.first()
        return None if entry is None else entry[1]

    def join(self, sequence: Sequence) -> None:
        """Takes its place in line."""
        sequence.state = State.WAITING
        self._heap.push(sequence.rank, sequence)

    def leave(self, sequence: Sequence) -> None:
        """Out of the line, parked or not. Its next state is the caller's to set."""
        digest = sequence.parked_on
        if digest is None:
            self._heap.discard(sequence)
            return
        parked = self._parked[digest]
        del parked[sequence]
        if not parked:
            del self._parked[digest]
        sequence.parked_on = None
        self._n_parked -= 1

    def park(self, sequence: Sequence, digest: bytes) -> None:
        """Stands aside until unpark(digest)."""
        self._heap.discard(sequence)
        sequence.parked_on = digest
        self._parked.setdefault(digest, {})[sequence] = None
        self._n_parked += 1

    def unpark(self, digest: bytes) -> None:
        """Those parked on this page take their places again."""
        for sequence in self._parked.pop(digest, ()):
            self._n_parked -= 1
            sequence.parked_on = None
            self._heap.push(sequence.rank, sequence)
