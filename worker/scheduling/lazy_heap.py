"""A heap from which anything can be removed at any time."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

_SLACK = 64
"""Removed entries that may stay before the heap is rebuilt, besides as many as there are live ones."""


class LazyHeap(Generic[Item]):
    """Items by key, least first, equal keys by insertion; each item at most once.

    A removed item leaves its entry behind until that comes to the top or the dead outnumber the live,
    so every operation takes O(log n), on average over many.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, Item]] = []
        self._live: dict[Item, int] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._live)

    def push(self, key: Any, item: Item) -> None:
        """Raises ValueError if the item is in."""
        if item in self._live:
            raise ValueError(f"{item!r} is in the heap already")
        self._serial += 1
        self._live[item] = self._serial
        heappush(self._entries, (key, self._serial, item))

    def discard(self, item: Item) -> None:
        """Removes the item if it is in."""
        if self._live.pop(item, None) is not None and len(self._entries) > 2 * len(self._live) + _SLACK:
            self._entries = [entry for entry in self._entries if self._is_live(entry)]
            heapify(self._entries)

    def first(self) -> tuple[Any, Item] | None:
        """The least key and its item."""
        while self._entries and not self._is_live(self._entries[0]):
            heappop(self._entries)
        if not self._entries:
            return None
        key, _, item = self._entries[0]
        return key, item

    def _is_live(self, entry: tuple[Any, int, Item]) -> bool:
        return self._live.get(entry[2]) == entry[1]
