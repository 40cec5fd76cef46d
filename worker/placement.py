"""Which worker gets a request: the least loaded, unless one nearly as idle holds the prompt's beginning.

Knows no connection; a worker is a number with a load.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping

from engine.interface import PAGE_SIZE, IntArray

MAX_HASHED_PAGES = 64
"""Longer beginnings are told apart by their first 4,096 tokens."""


class Placement:
    """Remembers which prompt beginnings went to which worker; their pages may be forgotten by now, or have
    come by another front, so this is a guess that costs nothing if wrong."""

    def __init__(self, imbalance: float, remembered: int) -> None:
        """See PoolOptions."""
        self._imbalance = imbalance
        self._remembered = remembered
        self._prefixes: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)
        self._turn = 0

    def choose(self, loads: Mapping[int, float], prompt: IntArray, salt: str) -> int:
        """The worker to send to, of those in `loads` (at least one); remembers the choice."""
        if len(loads) == 1:
            return next(iter(loads))
        hashes = list(_prefix_hashes(prompt, salt))
        least = min(loads.values())
        limit = least + max(self._imbalance, least / 4)
        self._turn += 1

        def rank(worker: int) -> tuple[int, float, int]:
            pages = self._matched_pages(worker, hashes) if loads[worker] <= limit else 0
            return pages, -loads[worker], (worker + self._turn) % len(loads)

        worker = max(loads, key=rank)
        self._remember(worker, hashes)
        return worker

    def forget(self, worker: int) -> None:
        """The worker was started anew, with an empty cache."""
        self._prefixes.pop(worker, None)

    def _matched_pages(self, worker: int, hashes: list[tuple[int, int]]) -> int:
        known = self._prefixes[worker]
        return max((pages for pages, digest in hashes if digest in known), default=0)

    def _remember(self, worker: int, hashes: list[tuple[int, int]]) -> None:
        known = self._prefixes[worker]
        for _, digest in hashes:
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > self._remembered:
            known.popitem(last=False)


def _prefix_hashes(prompt: IntArray, salt: str) -> Iterable[tuple[int, int]]:
    """(pages, hash) of the prompt's first 1, 2, 4, … full pages."""
    pages = 1
    while pages <= MAX_HASHED_PAGES and pages * PAGE_SIZE <= len(prompt):
        yield pages, hash((salt, prompt[: pages * PAGE_SIZE].tobytes()))
        pages *= 2
