"""KV pages: references, the prefix cache, and what is evicted first."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.interface import pages_for
from worker.pages import PageManager, page_digest, root_digest

PAGE = np.arange(64, dtype=np.int32)


def test_pages_for_rounds_up() -> None:
    assert [pages_for(n) for n in (0, 1, 63, 64, 65, 128, 129)] == [0, 1, 1, 1, 2, 2, 3]


def test_a_digest_depends_on_salt_parent_every_token_and_their_order() -> None:
    root = root_digest("")
    digest = page_digest(root, PAGE)
    assert digest == page_digest(root_digest(""), PAGE.copy())
    others = [
        page_digest(root_digest("salt"), PAGE),
        page_digest(digest, PAGE),
        page_digest(root, PAGE[::-1].copy()),
    ]
    for position in range(64):
        changed = PAGE.copy()
        changed[position] += 1 << 16
        others.append(page_digest(root, changed))
    assert len({digest, *others}) == 1 + len(others)
    assert len(digest) >= 16


def test_take_gives_distinct_pages_until_none_is_left() -> None:
    pages = PageManager(5)
    taken = pages.take(3) + pages.take(2)
    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert pages.n_available == 0
    with pytest.raises(ValueError, match="1 pages wanted, 0 available"):
        pages.take(1)


def test_a_shared_page_comes_back_with_its_last_reference() -> None:
    pages = PageManager(1)
    (page,) = pages.take(1)
    pages.register(page, b"a")
    pages.share([page])
    pages.release([page])
    assert pages.n_available == 0
    pages.release([page])
    assert (pages.n_free, pages.n_cached) == (0, 1)


def test_releasing_a_page_that_nobody_holds_is_an_error() -> None:
    pages = PageManager(1)
    with pytest.raises(ValueError, match="page 0 is released but in no table"):
        pages.release([0])


def test_find_gives_the_longest_cached_prefix() -> None:
    pages = PageManager(4)
    taken = pages.take(3)
    for page, digest in zip(taken, (b"a", b"b", b"c"), strict=True):
        pages.register(page, digest)
    assert pages.find([b"a", b"b", b"x", b"c"]) == taken[:2]
    assert pages.find([b"x", b"a"]) == []
    pages.release(taken)
    assert pages.find([b"a", b"b", b"c"]) == taken
    assert pages.count_cached(taken) == 3
    pages.share(taken[:2])
    assert pages.count_cached(taken) == 1


def test_of_two_pages_with_the_same_content_the_first_goes_on_to_be_found() -> None:
    pages = PageManager(2)
    first, second = pages.take(2)
    pages.register(first, b"a")
    pages.register(second, b"a")
    assert pages.find([b"a"]) == [first]
    pages.release([second])
    assert (pages.n_free, pages.n_cached) == (1, 0)


def test_free_pages_are_given_before_cached_ones_are_evicted() -> None:
    pages = PageManager(3)
    (page,) = pages.take(1)
    pages.register(page, b"a")
    pages.release([page])
    assert page not in pages.take(2)
    assert pages.find([b"a"]) == [page]
    assert pages.take(1) == [page]
    assert pages.find([b"a"]) == []


def test_the_least_recently_used_prefix_is_evicted_first_and_its_end_before_its_beginning() -> None:
    pages = PageManager(4)
    old, new = pages.take(2), pages.take(2)
    for page, digest in zip(old + new, (b"o0", b"o1", b"n0", b"n1"), strict=True):
        pages.register(page, digest)
    pages.release(new)
    pages.release(old)
    pages.share(new)  # used again, so `old` is now the least recently used
    pages.release(new)
    assert [pages.take(1)[0] for _ in range(4)] == [old[1], old[0], new[1], new[0]]


def test_a_forgotten_prefix_is_found_no_more_whether_its_page_is_in_use_or_cached() -> None:
    pages = PageManager(2)
    used, cached = pages.take(2)
    pages.register(used, b"u")
    pages.register(cached, b"c")
    pages.release([cached])
    pages.forget(b"u")
    pages.forget(b"c")
    pages.forget(b"never known")
    assert pages.find([b"u"]) == pages.find([b"c"]) == []
    assert (pages.n_free, pages.n_cached) == (1, 0)
    pages.release([used])
    assert (pages.n_free, pages.n_cached) == (2, 0)


def test_a_page_registered_again_after_being_forgotten_is_found() -> None:
    pages = PageManager(1)
    (page,) = pages.take(1)
    pages.register(page, b"a")
    pages.forget(b"a")
    pages.register(page, b"a")
    assert pages.find([b"a"]) == [page]


class PagesAgainstModel(RuleBasedStateMachine):
    """Random tables of pages, against counts kept the plain way."""

    N_PAGES = 7

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageManager(self.N_PAGES)
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        """By page, as far as it could be found."""

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        if count > self.pages.n_available:
            with pytest.raises(ValueError, match="pages wanted"):
                self.pages.take(count)
            return
        in_use = {page for table in self.tables for page in table}
        taken = self.pages.take(count)
        assert not in_use & set(taken)
        for page in taken:
            self.content.pop(page, None)
        self.tables.append(taken)

    @rule(digests=st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=4, unique=True))
    def share(self, digests: list[bytes]) -> None:
        found = self.pages.find(digests)
        by_content = {digest: page for page, digest in self.content.items()}
        expected = []
        for digest in digests:
            if digest not in by_content:
                break
            expected.append(by_content[digest])
        assert found == expected
        self.pages.share(found)
        self.tables.append(found)

    @rule(data=st.data(), digest=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def register(self, data: st.DataObject, digest: bytes) -> None:
        in_use = sorted({page for table in self.tables for page in table})
        if in_use:
            page = data.draw(st.sampled_from(in_use))
            self.pages.register(page, digest)
            if page not in self.content and digest not in self.content.values():
                self.content[page] = digest

    @rule(digest=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def forget(self, digest: bytes) -> None:
        self.pages.forget(digest)
        self.content = {page: held for page, held in self.content.items() if held != digest}

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.tables:
            before = self.pages.n_releases
            self.pages.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))
            assert self.pages.n_releases > before

    @invariant()
    def counts_agree(self) -> None:
        references = Counter(page for table in self.tables for page in table)
        assert [self.pages.references(page) for page in range(self.N_PAGES)] == [
            references[page] for page in range(self.N_PAGES)
        ]
        cached = [page for page in self.content if not references[page]]
        assert self.pages.n_cached == len(cached)
        assert self.pages.n_free == self.N_PAGES - len(references) - len(cached)
        assert self.pages.n_available == self.N_PAGES - len(references)


PagesAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPagesAgainstModel = PagesAgainstModel.TestCase
