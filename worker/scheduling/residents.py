"""The sequences that hold slots and pages: starting, growing and leaving. Decides not who, only how."""

from __future__ import annotations

from bisect import insort
from heapq import heappop, heappush

from engine.interface import PAGE_SIZE, EngineCapacity, PageAssignment, SlotStart, pages_for
from worker.pages import PageManager
from worker.scheduling.prefixes import PrefixSharing
from worker.sequence import NO_SLOT, Rank, Sequence, State

_RESERVE_SHARE = 16
"""Of all pages, at most one in so many is kept back from newcomers."""


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


class Residents:
    """Hands out slots and pages, and keeps what the engine must be told about them in the next plan."""

    def __init__(self, capacity: EngineCapacity, pages: PageManager, prefixes: PrefixSharing) -> None:
        self.prefilling: list[Sequence] = []
        """By rank."""
        self.releases: list[int] = []
        """Slots given back since the last plan."""
        self._pages = pages
        self._prefixes = prefixes
        self._n_slots = capacity.slots
        self._free_slots = list(range(capacity.slots))  # a heap: low numbers first keep decode rows dense
        self._decoding: dict[int, Sequence] = {}
        self._is_lent = False
        self._decode_slots: tuple[int, ...] | None = ()

    def __len__(self) -> int:
        return self._n_slots - len(self._free_slots)

    @property
    def n_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def decoding(self) -> dict[int, Sequence]:
        """By slot; not to be changed, and not to be kept beyond the next change."""
        return self._decoding

    def lend_decoding(self) -> dict[int, Sequence]:
        """As it is now, to be kept: later changes are made to a copy."""
        self._is_lent = True
        return self._decoding

    def decode_slots(self) -> tuple[int, ...]:
        """Slots of all decoding sequences."""
        if self._decode_slots is None:
            self._decode_slots = tuple(self._decoding)
        return self._decode_slots

    def worst(self) -> Sequence:
        """The youngest of the lowest priority. There must be a resident."""
        candidates = [max(part, key=_rank) for part in (self._decoding.values(), self.prefilling) if part]
        return max(candidates, key=_rank)

    def has_pages_for(self, sequence: Sequence, found: list[int]) -> bool:
        """Whether a newcomer that shares the `found` pages gets all that its known tokens need.

        A page for each resident to grow into is kept back, or the newcomer would soon push somebody
        out (itself, most likely) and its prefill would have been for nothing. Alone, it needs none.
        """
        reserve = min(len(self), self._pages.n_pages // _RESERVE_SHARE)
        available = self._pages.n_available - self._pages.count_cached(found)
        return pages_for(sequence.n_known) - len(found) + reserve <= available

    def start(self, sequence: Sequence, found: list[int]) -> tuple[SlotStart, list[PageAssignment]]:
        """Gives a slot, the `found` pages and new ones for all other known tokens; prefill comes next."""
        slot = heappop(self._free_slots)
        self._pages.share(found)
        pages = found + self._pages.take(pages_for(sequence.n_known) - len(found))
        sequence.state = State.PREFILLING
        sequence.slot = slot
        sequence.pages = pages
        sequence.room = len(pages) * PAGE_SIZE
        sequence.tokens = sequence.known_tokens()
        sequence.n_computed = len(found) * PAGE_SIZE
        sequence.n_planned = len(sequence.output)
        sequence.n_published = sequence.n_shared_pages = len(found)
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs = []
        insort(self.prefilling, sequence, key=_rank)
        self._prefixes.promise(sequence)
        start = SlotStart(
            slot,
            sequence.start_sampling(),
            sequence.request.prompt,
            sequence.tokens[len(sequence.request.prompt) :],
        )
        return start, [PageAssignment(slot, index, page) for index, page in enumerate(pages)]

    def grow(self, sequence: Sequence) -> PageAssignment:
        """One page more, of which at least one must be available."""
        self._prefixes.publish(sequence, _final_positions(sequence))
        (page,) = self._pages.take(1)
        sequence.pages.append(page)
        sequence.room += PAGE_SIZE
        return PageAssignment(sequence.slot, len(sequence.pages) - 1, page)

    def begin_decoding(self, sequence: Sequence) -> None:
        """All known tokens of a prefilling sequence are in steps."""
        self.prefilling.remove(sequence)
        sequence.state = State.DECODING
        self._own_decoding()[sequence.slot] = sequence

    def leave(self, sequence: Sequence, *, keep_prefix: bool = True) -> None:
        """Gives back slot and pages; full pages stay cached, those not registered yet if `keep_prefix`."""
        if sequence.state is State.PREFILLING:
            self.prefilling.remove(sequence)
            self._prefixes.break_promises(sequence)
        else:
            del self._own_decoding()[sequence.slot]
            if keep_prefix:
                self._prefixes.publish(sequence, _final_positions(sequence))
        self._pages.release(sequence.pages)
        self.releases.append(sequence.slot)
        heappush(self._free_slots, sequence.slot)
        sequence.slot = NO_SLOT
        sequence.pages = []

    def _own_decoding(self) -> dict[int, Sequence]:
        if self._is_lent:
            self._decoding = self._decoding.copy()
            self._is_lent = False
        self._decode_slots = None
        return self._decoding


def _final_positions(sequence: Sequence) -> int:
    """Positions of a decoding sequence whose KV is in steps for certain, of tokens known by now.

    The last token collected may be a stop token, and then its row, though planned, writes nothing.
    """
    return max(len(sequence.tokens), min(sequence.n_computed, sequence.n_known - 1))
