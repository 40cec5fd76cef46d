"""Who is there: fronts, their sequences, requests by id, deadlines, and early aborts."""

from __future__ import annotations

from worker.scheduling.aborts import AbortMemory
from worker.scheduling.lazy_heap import LazyHeap
from worker.scheduling.news import FrontNews
from worker.sequence import Request, Sequence


class Registry:
    """Finds live requests and sequences by every name they are called by."""

    def __init__(self, aborts: AbortMemory) -> None:
        self.aborts = aborts
        self.fronts: dict[int, FrontNews] = {}
        self._requests: dict[str, list[Request]] = {}
        self._deadlines: LazyHeap[Request] = LazyHeap()
        self._n_sequences = 0

    def __len__(self) -> int:
        """Live sequences."""
        return self._n_sequences

    def front(self, front: int) -> FrontNews:
        """The front's news and sequences; a new front is made known."""
        news = self.fronts.get(front)
        if news is None:
            news = self.fronts[front] = FrontNews()
        return news

    def sequence(self, front: int, key: int) -> Sequence | None:
        """The live sequence with this key."""
        news = self.fronts.get(front)
        return None if news is None else news.sequences.get(key)

    def requests(self, request_id: str) -> list[Request]:
        """What is live under this id: several, if a request's answers were resubmitted one by one."""
        return self._requests.get(request_id, [])

    def sequences(self) -> list[Sequence]:
        """All live ones."""
        return [sequence for news in self.fronts.values() for sequence in news.sequences.values()]

    def add(self, request: Request) -> None:
        """A new request with all its answers."""
        self._requests.setdefault(request.request_id, []).append(request)
        if request.deadline is not None:
            self._deadlines.push(request.deadline, request)
        for sequence in request.live:
            sequence.news.sequences[sequence.key] = sequence
        self._n_sequences += len(request.live)

    def remove(self, sequence: Sequence) -> None:
        """One answer has finished, and its request with the last of them."""
        request = sequence.request
        request.live.remove(sequence)
        del sequence.news.sequences[sequence.key]
        self._n_sequences -= 1
        if not request.live:
            namesakes = self._requests[request.request_id]
            namesakes.remove(request)
            if not namesakes:
                del self._requests[request.request_id]
            self._deadlines.discard(request)

    def next_deadline(self) -> float | None:
        """The earliest, or None."""
        entry = self._deadlines.first()
        return None if entry is None else float(entry[0])

    def overdue(self, now: float) -> Request | None:
        """A request whose time is up, or None."""
        entry = self._deadlines.first()
        return entry[1] if entry is not None and entry[0] <= now else None
