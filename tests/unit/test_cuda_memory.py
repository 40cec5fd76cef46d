"""The CUDA engine's arena, and how much memory it may take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings")

from engine.cuda.memory import ALIGNMENT, Arena, Layout, memory_budget
from kernels.tensor import DType

GB = 1 << 30


class FakeDevice:
    """Hands out one address and remembers what was freed."""

    def __init__(self, address: int = 1 << 40) -> None:
        self.address = address
        self.allocated: list[int] = []
        self.freed: list[int] = []

    def allocate(self, size: int) -> int:
        self.allocated.append(size)
        return self.address

    def free(self, address: int) -> None:
        self.freed.append(address)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 300), min_size=1, max_size=3).map(tuple), st.sampled_from(list(DType))
        ),
        max_size=20,
    )
)
def test_tensors_neither_overlap_nor_leave_the_arena(tensors: list[tuple[tuple[int, ...], DType]]) -> None:
    layout = Layout()
    for index, (shape, dtype) in enumerate(tensors):
        layout.add("part", str(index), shape, dtype)
    arena = Arena.allocate(layout, FakeDevice())
    end = arena.address
    for index, (shape, dtype) in enumerate(tensors):
        tensor = arena.tensor(str(index))
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert tensor.address % ALIGNMENT == 0
        assert tensor.address >= end
        end = tensor.address + tensor.bytes
    assert end <= arena.address + layout.bytes


def test_parts_add_up_to_the_layout() -> None:
    layout = Layout()
    layout.add("weights", "a", (3, 5), DType.BF16)
    layout.add("slot_state", "b", (7,), DType.I32)
    layout.add("weights", "c", (100,), DType.F32)
    assert layout.bytes_by_part() == {"weights": 256 + 512, "slot_state": 256}
    assert sum(layout.bytes_by_part().values()) == layout.bytes


def test_parts_that_lie_together_span_one_block() -> None:
    layout = Layout()
    for part, name, count in (
        ("weights", "a", 10),
        ("logits", "b", 300),
        ("rope", "c", 1),
        ("logits", "d", 70),
    ):
        layout.add(part, name, (count,), DType.U8)
    assert layout.span("weights") == (0, 10)
    assert layout.span("logits", "rope") == (256, 512 + 256 + 70)
    assert layout.span("kv_pages") == (0, 0)
    with pytest.raises(ValueError, match="logits do not lie together"):
        layout.span("logits")


def test_a_name_is_taken_once() -> None:
    layout = Layout()
    layout.add("weights", "a", (1,), DType.U8)
    with pytest.raises(ValueError, match="two tensors named 'a'"):
        layout.add("logits", "a", (1,), DType.U8)


def test_an_arena_is_one_allocation_freed_once() -> None:
    layout = Layout()
    layout.add("weights", "a", (1000,), DType.F32)
    device = FakeDevice()
    arena = Arena.allocate(layout, device)
    assert device.allocated == [layout.bytes]
    arena.close()
    arena.close()
    assert device.freed == [device.address]
    assert "a" not in arena


def test_an_arena_must_be_aligned() -> None:
    with pytest.raises(ValueError, match="not aligned"):
        Arena(Layout(), 1 << 40 | 16)


def test_budget_leaves_what_others_hold() -> None:
    assert memory_budget(100 * GB, 99 * GB, 0.9).bytes == 89 * GB
    assert memory_budget(100 * GB, 30 * GB, 0.9).bytes == 20 * GB
    assert memory_budget(100 * GB, 5 * GB, 0.9).bytes == 0
