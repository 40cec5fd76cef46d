"""Sampling on the device: one token per row of logits, and the slot's step forward.

Four launches scan (sampling.cu), one chooses (sampling_finish.cu).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum

from kernels.compiler import CompileUnit
from kernels.launch import Dim3, KernelLibrary, Launch, i32
from kernels.slots import SlotBuffers
from kernels.tensor import DType, Tensor, expect

SOURCE = "sampling.cu"
FINISH_SOURCE = "sampling_finish.cu"
CHUNK = 4096
"""Vocabulary entries per block of the scanning kernels."""
MAX_VOCAB = 128 * CHUNK
_BINS = 2048
_CHUNKS_PER_BLOCK = ((24, 4), (8, 2), (0, 1))
"""From so many rows on, a block of sample_weigh and sample_collect takes so many chunks."""
_C_TYPES = {DType.F32: "float", DType.BF16: "bf16"}
_STAGES = ("sample_scan", "sample_weigh", "sample_collect")
UNITS = (
    *(
        CompileUnit(
            SOURCE, tuple(f"{stage}<{t}>" for stage in _STAGES) + (() if t == "bf16" else ("sample_cut",))
        )
        for t in _C_TYPES.values()
    ),
    *(CompileUnit(FINISH_SOURCE, (f"sample_finish<{c_type}>",)) for c_type in _C_TYPES.values()),
)


class RowStatus(IntEnum):
    """What became of a row."""

    NO_TOKEN = 0
    """Padding, or its slot is not active."""
    TOKEN = 1
    STOPPED = 2
    """The token is one of the slot's stop tokens; the slot is inactive from now on."""
    FAULT = 3
    """Nothing to choose from (a logit is NaN or +inf, or all are −inf); the slot is inactive from now on."""


class _Scratch(ctypes.Structure):
    """SampleScratch of include/sampling_rows.cuh."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "processed",
            "best",
            "mass",
            "bin_counts",
            "bin_masses",
            "cut",
            "n_collected",
            "collected",
        )
    )


@dataclass(frozen=True, slots=True)
class SampleShape:
    """What the scratch depends on."""

    rows: int
    stride: int
    """Entries from one row of logits to the next, a multiple of 8; at least the vocabulary."""
    vocab: int

    @property
    def chunks(self) -> int:
        return -(-self.vocab // CHUNK)

    def scratch(self) -> dict[str, tuple[tuple[int, ...], DType]]:
        """Shapes and types of the buffers, by field of SampleScratch."""
        return {
            "processed": ((self.rows, self.stride), DType.F32),
            "best": ((self.rows, self.chunks, 2), DType.U64),
            "mass": ((self.rows, self.chunks, 4), DType.U64),
            "bin_counts": ((self.rows, _BINS), DType.I32),
            "bin_masses": ((self.rows, _BINS), DType.U64),
            "cut": ((self.rows, 4), DType.I32),
            "n_collected": ((self.rows, self.chunks), DType.I32),
            "collected": ((self.rows, self.chunks, CHUNK * 2), DType.U8),
        }


@dataclass(frozen=True, slots=True)
class SampleScratch:
    """Device buffers of SampleShape.scratch, for one stream."""

    processed: Tensor
    best: Tensor
    mass: Tensor
    bin_counts: Tensor
    bin_masses: Tensor
    cut: Tensor
    n_collected: Tensor
    collected: Tensor


def sample(
    library: KernelLibrary,
    *,
    logits: Tensor,
    row_slot: Tensor,
    slots: SlotBuffers,
    scratch: SampleScratch,
    tokens: Tensor,
    statuses: Tensor,
    first_token: bool,
    all_greedy: bool = False,
) -> list[Launch]:
    """The launches that sample every row whose slot is at it, in order.

    logits      float32 or bf16 [rows, stride]; entries from the vocabulary's end on are ignored
    row_slot    int32 [rows], −1 for padding; no slot twice
    scratch     as in SampleShape.scratch, for at least these rows and this stride
    tokens      int32 [rows], −1 where there is none; statuses: int32 [rows], RowStatus
    first_token the rows end a prefill: their slots are not active yet, and become so
    all_greedy  temperature is 0 in every row: two launches instead of five

    A slot whose row got a token has it as last_token, its position and output count are one higher, and it is
    active unless it stopped. Raises ValueError for shapes that do not fit.
    """
    rows, stride = logits.shape
    vocab = slots.shape.vocab
    if logits.dtype not in _C_TYPES or stride % 8 or stride < vocab or vocab > MAX_VOCAB:
        raise ValueError(
            f"{SOURCE}: logits must be float32 or bf16, their stride a multiple of 8 and at least the "
            f"vocabulary ({vocab}, at most {MAX_VOCAB}), got {logits.dtype.value} with {stride}"
        )
    expect(SOURCE, "logits", logits, logits.dtype, (rows, stride))
    for name, tensor in (("row_slot", row_slot), ("tokens", tokens), ("statuses", statuses)):
        expect(SOURCE, name, tensor, DType.I32, (rows,))
    shape = SampleShape(rows, stride, vocab)
    for name, (wanted, dtype) in shape.scratch().items():
        buffer: Tensor = getattr(scratch, name)
        if buffer.dtype is not dtype or buffer.bytes < Tensor(0, wanted, dtype).bytes:
            raise ValueError(f"{SOURCE}: scratch.{name} is {list(buffer.shape)}, needs {list(wanted)}")
    view = _Scratch(*(getattr(scratch, name).address for name in shape.scratch()))
    arrays = slots.arrays()
    c_type = _C_TYPES[logits.dtype]
    flag, chunks = i32(first_token), i32(shape.chunks)
    scan = library.kernel(SOURCE, f"sample_scan<{c_type}>")
    scan_arguments = (logits, row_slot, arrays, view, i32(stride), flag)
    launches = [Launch(scan, Dim3(shape.chunks, rows), Dim3(256), scan_arguments)]
    if not all_greedy:
        per_block = next(chunks for least_rows, chunks in _CHUNKS_PER_BLOCK if rows >= least_rows)
        grid = Dim3(-(-shape.chunks // per_block), rows)
        arguments = (logits, row_slot, arrays, view, i32(stride), chunks, flag)
        weigh = library.kernel(SOURCE, f"sample_weigh<{c_type}>")
        cut = library.kernel(SOURCE, "sample_cut")
        collect = library.kernel(SOURCE, f"sample_collect<{c_type}>")
        launches += [
            Launch(weigh, grid, Dim3(256), arguments),
            Launch(cut, Dim3(rows), Dim3(256), (row_slot, arrays, view, chunks, flag)),
            Launch(collect, grid, Dim3(256), arguments),
        ]
    finish = library.kernel(FINISH_SOURCE, f"sample_finish<{c_type}>")
    finish_arguments = (
        logits, row_slot, arrays, view, tokens, statuses, i32(stride), i32(shape.chunks), i32(first_token),
    )  # fmt: skip
    return [*launches, Launch(finish, Dim3(rows), Dim3(512), finish_arguments)]
