"""KV pages: who holds them, what they hold, which to give up first.

A page holds PAGE_SIZE tokens of keys and values. It is *free* (holds nothing), *in use* (one or more
block tables contain it) or *cached* (in no table, but it holds a known prefix and can be shared again
until somebody needs the room). Knows no sequence, no slot and no engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from engine.interface import IntArray

DIGEST_BYTES = 32
"""256 bits: that two prefixes share a digest, by accident or by design, is out of the question, so a
digest stands for its prefix without comparing tokens."""


def root_digest(salt: str) -> bytes:
    """The digest that stands before a first page; prefixes under different salts share nothing."""
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES).digest()


def page_digest(parent: bytes, tokens: IntArray) -> bytes:
    """The digest of a full page, int32 [PAGE_SIZE], after the prefix that `parent` stands for."""
    return blake2b(parent + tokens.astype("<i4", copy=False).tobytes(), digest_size=DIGEST_BYTES).digest()


class PageManager:
    """Counts references to pages, and finds cached ones by the digest of the prefix they end."""

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self.n_releases = 0
        """Grows whenever a page comes within reach of take(): where it has not, take() cannot do more."""
        self._references = [0] * n_pages
        self._free = list(range(n_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def n_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def n_cached(self) -> int:
        """Pages in no table that hold a prefix."""
        return len(self._cached)

    @property
    def n_available(self) -> int:
        """Pages that take() can give: free ones and, after those, cached ones."""
        return len(self._free) + len(self._cached)

    def references(self, page: int) -> int:
        """In how many tables the page is."""
        return self._references[page]

    def take(self, count: int) -> list[int]:
        """Gives pages that hold nothing, each with one reference, evicting cached ones if it must.

        Raises ValueError if fewer than `count` are available.
        """
        if count > self.n_available:
            raise ValueError(f"{count} pages wanted, {self.n_available} available")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each of these pages, which find() has just returned."""
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reference less to each page of a block table, which is given in its order.

        The last pages of a table become the first to be evicted: without what goes before they are of
        no use to anybody, while the first ones may serve many.
        """
        self.n_releases += 1
        for page in reversed(pages):
            left = self._references[page] = self._references[page] - 1
            if left < 0:
                raise ValueError(f"page {page} is released but in no table")
            if left == 0:
                if page in self._digest_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def register(self, page: int, digest: bytes) -> None:
        """The page, in use, now holds all of the prefix's last PAGE_SIZE tokens and will not change.

        If another page already holds the same, that one goes on to be found and this one is not.
        """
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def forget(self, digest: bytes) -> None:
        """Nobody shall find this prefix any more (what its page holds is in doubt)."""
        page = self._page_of.pop(digest, None)
        if page is None:
            return
        del self._digest_of[page]
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The pages of the longest cached prefix; `digests` are those of a sequence's pages, in order."""
        found: list[int] = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def count_cached(self, pages: Iterable[int]) -> int:
        """How many of these are in no table, and would no longer be available once shared."""
        return sum(self._references[page] == 0 for page in pages)

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._digest_of.pop(page)]
        return page
