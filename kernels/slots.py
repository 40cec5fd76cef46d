"""A slot's state on the device and the host's changes to it (slots.cu, include/slots.cuh).

The host stages lists of starts, slot changes and page assignments; the device applies them in order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.compiler import CompileUnit
from kernels.launch import Dim3, KernelLibrary, Launch, i32
from kernels.tensor import DType, Tensor, expect

SOURCE = "slots.cu"
UNITS = (CompileUnit(SOURCE, ("change_slots", "start_slots")),)

SAMPLING_DTYPE = np.dtype(
    [
        ("seed", np.uint64),
        ("top_p", np.float64),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("top_k", np.int32),
        ("min_tokens", np.int32),
        ("logprobs", np.int32),
        ("n_stop", np.int32),
        ("n_bias", np.int32),
        ("penalised", np.int32),
        ("unused", np.int32),
    ]
)
"""SlotSampling of include/slots.cuh, 64 bytes."""

START_DTYPE = np.dtype(
    [
        ("sampling", SAMPLING_DTYPE),
        ("slot", np.int32),
        ("n_output", np.int32),
        ("first_token", np.int32),
        ("n_tokens", np.int32),
        ("first_stop", np.int32),
        ("first_bias", np.int32),
        ("unused", np.int32, 2),
    ]
)
"""SlotStart of slots.cu, 96 bytes."""

CHANGE_INTS = 4
"""A slot change: slot, position (−1: stays), active (−1: stays), 0. A page change: slot, index, page, 0."""


class SlotArrays(ctypes.Structure):
    """SlotArrays of include/slots.cuh: the device arrays of all slots, passed to kernels by value."""

    _fields_ = (
        ("sampling", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        ("active", ctypes.c_uint64),
        ("last_token", ctypes.c_uint64),
        ("output_count", ctypes.c_uint64),
        ("stop_ids", ctypes.c_uint64),
        ("bias_ids", ctypes.c_uint64),
        ("bias_values", ctypes.c_uint64),
        ("counts", ctypes.c_uint64),
        ("max_stop", ctypes.c_int32),
        ("max_bias", ctypes.c_int32),
        ("vocab", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class SlotShape:
    """Sizes of the slot state."""

    slots: int
    vocab: int
    max_stop: int = 64
    max_bias: int = 1024

    def buffers(self) -> dict[str, tuple[tuple[int, ...], DType]]:
        """Shapes and types of the device buffers, by field of SlotBuffers. All must start as zeros."""
        return {
            "sampling": ((self.slots, SAMPLING_DTYPE.itemsize), DType.U8),
            "position": ((self.slots,), DType.I32),
            "active": ((self.slots,), DType.I32),
            "last_token": ((self.slots,), DType.I32),
            "output_count": ((self.slots,), DType.I32),
            "stop_ids": ((self.slots, self.max_stop), DType.I32),
            "bias_ids": ((self.slots, self.max_bias), DType.I32),
            "bias_values": ((self.slots, self.max_bias), DType.F32),
            "counts": ((self.slots, self.vocab), DType.U32),
        }


@dataclass(frozen=True, slots=True)
class SlotBuffers:
    """The device buffers of SlotShape.buffers."""

    shape: SlotShape
    sampling: Tensor
    position: Tensor
    active: Tensor
    last_token: Tensor
    output_count: Tensor
    stop_ids: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    counts: Tensor

    def __post_init__(self) -> None:
        for name, (shape, dtype) in self.shape.buffers().items():
            expect(SOURCE, name, getattr(self, name), dtype, shape)

    def arrays(self) -> SlotArrays:
        """The kernels' view."""
        addresses = [getattr(self, name).address for name in self.shape.buffers()]
        return SlotArrays(*addresses, self.shape.max_stop, self.shape.max_bias, self.shape.vocab, 0)


@dataclass(frozen=True, slots=True)
class SlotSetup:
    """One sequence's sampling settings and past, as the host knows them."""

    slot: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    logprobs: int | None = None
    stop_ids: Sequence[int] = ()
    bias: Mapping[int, float] | None = None
    prompt: NDArray[np.int32] | None = None
    """Counted where a penalty is on."""
    output: NDArray[np.int32] | None = None
    """Tokens generated already; output indices go on from here."""

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class StagedStarts:
    """Starts as the device reads them; copy each array to a device buffer."""

    starts: NDArray[np.void]
    tokens: NDArray[np.int32]
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]


def stage_starts(setups: Sequence[SlotSetup], shape: SlotShape) -> StagedStarts:
    """Lays setups out for start_slots. Raises ValueError for a list that is longer than a slot can hold."""
    starts = np.zeros(len(setups), START_DTYPE)
    tokens: list[NDArray[np.int32]] = []
    bias_ids: list[NDArray[np.int32]] = []
    bias_values: list[NDArray[np.float32]] = []
    n_tokens = n_bias = 0
    none = np.zeros(0, np.int32)
    for start, setup in zip(starts, setups, strict=True):
        bias = setup.bias or {}
        stop_ids = np.array(sorted(setup.stop_ids), np.int32)
        if len(stop_ids) > shape.max_stop or len(bias) > shape.max_bias:
            raise ValueError(
                f"slot {setup.slot}: {len(stop_ids)} stop tokens and {len(bias)} biases; "
                f"a slot holds {shape.max_stop} and {shape.max_bias}"
            )
        prompt = none if setup.prompt is None else setup.prompt
        output = none if setup.output is None else setup.output
        history = np.concatenate([prompt, output]) if setup.penalised else none
        start["slot"], start["n_output"] = setup.slot, len(output)
        start["first_token"], start["n_tokens"] = n_tokens, len(history)
        start["first_stop"], start["first_bias"] = n_tokens + len(history), n_bias
        start["sampling"] = _sampling_record(setup, len(stop_ids), len(bias))
        tokens += [history, stop_ids]
        bias_ids.append(np.fromiter(bias.keys(), np.int32, len(bias)))
        bias_values.append(np.fromiter(bias.values(), np.float32, len(bias)))
        n_tokens += len(history) + len(stop_ids)
        n_bias += len(bias)
    return StagedStarts(
        starts,
        np.concatenate([*tokens, none]),
        np.concatenate([*bias_ids, none]),
        np.concatenate([*bias_values, none]).astype(np.float32),
    )


def _sampling_record(setup: SlotSetup, n_stop: int, n_bias: int) -> tuple[int | float, ...]:
    logprobs = -1 if setup.logprobs is None else setup.logprobs
    return (
        setup.seed,
        setup.top_p,
        setup.temperature,
        setup.min_p,
        setup.repetition_penalty,
        setup.presence_penalty,
        setup.frequency_penalty,
        setup.top_k,
        setup.min_tokens,
        logprobs,
        n_stop,
        n_bias,
        int(setup.penalised),
        0,
    )


def start_slots(
    library: KernelLibrary,
    *,
    starts: Tensor,
    count: int,
    tokens: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    slots: SlotBuffers,
) -> Launch:
    """Gives `count` slots new sequences from device copies of StagedStarts; they are not active yet.

    starts: uint8 [≥ count, 96]; tokens, bias_ids: int32; bias_values: float32. Raises ValueError.
    """
    expect(SOURCE, "starts", starts, DType.U8, (None, START_DTYPE.itemsize))
    if not 0 < count <= starts.shape[0]:
        raise ValueError(f"{SOURCE}: {count} starts from a list of {starts.shape[0]}")
    kernel = library.kernel(SOURCE, "start_slots")
    return Launch(kernel, Dim3(count), Dim3(256), (starts, tokens, bias_ids, bias_values, slots.arrays()))


def change_slots(
    library: KernelLibrary,
    *,
    counts: Tensor,
    changes: Tensor,
    pages: Tensor,
    slots: SlotBuffers,
    block_table: Tensor,
) -> Launch:
    """Applies slot changes (position, active) and page assignments to the block table.

    counts: int32 [2], how many of each; changes, pages: int32 [·, 4] (see CHANGE_INTS), no target twice.
    block_table: int32 [slots, width]. Lengths are read on the device, so the launch fits in a graph.
    """
    expect(SOURCE, "counts", counts, DType.I32, (2,))
    expect(SOURCE, "changes", changes, DType.I32, (None, CHANGE_INTS))
    expect(SOURCE, "pages", pages, DType.I32, (None, CHANGE_INTS))
    expect(SOURCE, "block_table", block_table, DType.I32, (slots.shape.slots, None))
    arguments = (counts, changes, pages, slots.arrays(), block_table, i32(block_table.shape[1]))
    return Launch(library.kernel(SOURCE, "change_slots"), Dim3(1), Dim3(256), arguments)
