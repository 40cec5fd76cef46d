"""The heap behind the waiting line and the deadlines, against a plain dictionary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.scheduling.lazy_heap import LazyHeap

ITEMS = st.integers(0, 3)
STEPS = st.lists(
    st.tuples(st.sampled_from(["push", "discard", "pop"]), ITEMS, st.integers(0, 9)), max_size=60
)


@given(STEPS)
def test_the_first_is_always_the_least_of_those_that_are_in(steps: list[tuple[str, int, int]]) -> None:
    heap: LazyHeap[int] = LazyHeap()
    model: dict[int, int] = {}
    for action, item, key in steps:
        first = heap.first()
        match action:
            case "push" if item not in model:
                heap.push(key, item)
                model[item] = key
            case "discard":
                heap.discard(item)
                model.pop(item, None)
            case "pop" if first is not None:
                heap.discard(first[1])
                del model[first[1]]
        first = heap.first()
        assert len(heap) == len(model)
        if first is None:
            assert not model
        else:
            assert first == (min(model.values()), first[1])
            assert model[first[1]] == first[0]


def test_equal_keys_come_in_the_order_of_their_insertion() -> None:
    heap: LazyHeap[str] = LazyHeap()
    for item in "cab":
        heap.push(1, item)
    order = []
    while (entry := heap.first()) is not None:
        order.append(entry[1])
        heap.discard(entry[1])
    assert order == ["c", "a", "b"]


def test_an_item_that_comes_back_comes_with_its_new_key() -> None:
    heap: LazyHeap[str] = LazyHeap()
    heap.push(1, "first")
    heap.push(2, "again")
    heap.discard("again")
    heap.push(9, "again")
    heap.push(5, "other")
    heap.discard("first")
    assert heap.first() == (5, "other")


def test_an_item_is_in_once() -> None:
    heap: LazyHeap[str] = LazyHeap()
    heap.push(1, "a")
    with pytest.raises(ValueError, match="in the heap already"):
        heap.push(2, "a")


def test_many_removals_leave_no_garbage_behind() -> None:
    heap: LazyHeap[int] = LazyHeap()
    heap.push(-1, -1)
    for item in range(10_000):
        heap.push(item, item)
        heap.discard(item)
    assert len(heap._entries) < 200
