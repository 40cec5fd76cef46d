"""The CUDA engine's memory plan and arena: budget, what fits, what a refusal says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings")

from engine.cuda.memory import ALIGNMENT, Arena, Layout, memory_budget, pages_for, plan_memory
from engine.errors import ModelError
from engine.options import EngineOptions
from kernels.tensor import DType

GB = 1 << 30


def _options(**changes: object) -> EngineOptions:
    return EngineOptions(model=Path("model"), **changes)  # type: ignore[arg-type]


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
    assert memory_budget(100 * GB, 99 * GB, 0.9) == 89 * GB
    assert memory_budget(100 * GB, 30 * GB, 0.9) == 20 * GB
    assert memory_budget(100 * GB, 5 * GB, 0.9) == 0


def test_all_that_is_left_becomes_pages() -> None:
    plan = plan_memory({"weights": 60, "logits": 15}, 10, _options(), model_length=128, budget=109)
    assert plan.pages == 3
    assert plan.bytes_by_purpose == {"weights": 60, "logits": 15, "kv_pages": 30}
    assert plan.max_sequence_length == 128
    assert plan.shortened is None


def test_a_long_model_is_cut_to_the_pages_there_are_and_says_so() -> None:
    plan = plan_memory({"weights": 60}, 10, _options(), model_length=4096, budget=100)
    assert plan.max_sequence_length == 256
    assert plan.shortened is not None
    assert "4096 to 256" in plan.shortened


def test_pages_asked_for_are_the_pages_taken() -> None:
    plan = plan_memory({"weights": 60}, 10, _options(kv_pages=2), model_length=64, budget=1000)
    assert plan.pages == 2
    with pytest.raises(ModelError, match="kv pages"):
        plan_memory({"weights": 60}, 10, _options(kv_pages=2), model_length=64, budget=79)


def test_a_length_asked_for_is_kept_or_refused() -> None:
    options = _options(max_sequence_length=200)
    assert plan_memory({}, 10, options, model_length=4096, budget=40).max_sequence_length == 200
    with pytest.raises(ModelError, match="does not fit"):
        plan_memory({}, 10, options, model_length=4096, budget=39)
    with pytest.raises(ModelError, match="raise kv_pages or lower max_sequence_length"):
        plan_memory({}, 10, _options(max_sequence_length=200, kv_pages=3), model_length=4096, budget=1000)
    with pytest.raises(ModelError, match=r"not in 1 … 128"):
        plan_memory({}, 10, options, model_length=128, budget=1000)


def test_a_refusal_names_every_part_and_what_to_lower() -> None:
    fixed = {"weights": 16 * 10**9, "activations": 3 * 10**9, "logits": 250 * 10**6}
    with pytest.raises(ModelError) as refusal:
        plan_memory(fixed, 9 * 10**6, _options(memory_fraction=0.5), model_length=4096, budget=12 * 10**9)
    message = str(refusal.value)
    for part in ("12.00 GB", "weights 16.00 GB", "activations 3.00 GB", "logits 250.0 MB", "kv pages 9.0 MB"):
        assert part in message
    assert message.index("smaller model") < message.index("max_step_tokens") < message.index("max_sequences")
    assert "memory_fraction 0.5" in message


@given(st.integers(0, 10**6))
def test_pages_hold_the_tokens(tokens: int) -> None:
    assert (pages_for(tokens) - 1) * 64 < max(tokens, 1) <= max(1, pages_for(tokens)) * 64
