"""Log-probabilities of given tokens, their ranks and the most likely alternatives (logprobs.cu)."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.compiler import CompileUnit
from kernels.launch import Dim3, KernelLibrary, Launch, i32
from kernels.slots import SlotBuffers
from kernels.tensor import DType, Tensor, expect

SOURCE = "logprobs.cu"
MAX_ALTERNATIVES = 20
_CHUNK = 4096
_PART_BYTES = MAX_ALTERNATIVES * 8 + 16
_C_TYPES = {DType.F32: "float", DType.BF16: "bf16"}
UNITS = tuple(CompileUnit(SOURCE, (f"logprob_chunks<{t}>", f"logprob_rows<{t}>")) for t in _C_TYPES.values())


@dataclass(frozen=True, slots=True)
class LogprobOutputs:
    """Device buffers for the results of `rows` rows."""

    logprobs: Tensor
    """float32 [rows], of the target."""
    ranks: Tensor
    """int32 [rows], 1 the most likely; 0: the row asked for nothing."""
    top_ids: Tensor
    """int32 [rows, 20], −1 past what was asked for."""
    top_logprobs: Tensor
    """float32 [rows, 20]."""


def parts_shape(rows: int, vocab: int) -> tuple[int, ...]:
    """Shape of the uint8 scratch."""
    return (rows, -(-vocab // _CHUNK), _PART_BYTES)


def token_logprobs(
    library: KernelLibrary,
    *,
    logits: Tensor,
    targets: Tensor,
    slots: SlotBuffers,
    parts: Tensor,
    outputs: LogprobOutputs,
    alternatives: Tensor | None = None,
    row_slot: Tensor | None = None,
) -> list[Launch]:
    """The launches that report on raw logits, float32 or bf16 [rows, stride].

    targets       int32 [rows]: the token that stands at each row; −1 skips the row
    alternatives  int32 [rows]: how many to list, −1 skips the row; or else
    row_slot      int32 [rows]: what the row's slot asks for
    parts         uint8 as in parts_shape

    Raises ValueError for shapes that do not fit.
    """
    rows, stride = logits.shape
    if logits.dtype not in _C_TYPES or stride < slots.shape.vocab:
        raise ValueError(f"{SOURCE}: logits must be float32 or bf16 [rows, ≥ {slots.shape.vocab}]")
    expect(SOURCE, "targets", targets, DType.I32, (rows,))
    if (alternatives is None) == (row_slot is None):
        raise ValueError(f"{SOURCE}: give either alternatives or row_slot")
    for name, tensor in (("alternatives", alternatives), ("row_slot", row_slot)):
        if tensor is not None:
            expect(SOURCE, name, tensor, DType.I32, (rows,))
    wanted = parts_shape(rows, slots.shape.vocab)
    expect(SOURCE, "parts", parts, DType.U8, (None, *wanted[1:]))
    expect(SOURCE, "logprobs", outputs.logprobs, DType.F32, (rows,))
    expect(SOURCE, "ranks", outputs.ranks, DType.I32, (rows,))
    expect(SOURCE, "top_ids", outputs.top_ids, DType.I32, (rows, MAX_ALTERNATIVES))
    expect(SOURCE, "top_logprobs", outputs.top_logprobs, DType.F32, (rows, MAX_ALTERNATIVES))
    if parts.shape[0] < rows:
        raise ValueError(f"{SOURCE}: parts has {parts.shape[0]} rows, needs {rows}")
    c_type = _C_TYPES[logits.dtype]
    arrays = slots.arrays()
    shared = (logits, targets, alternatives, row_slot, arrays, parts)
    results = (outputs.logprobs, outputs.ranks, outputs.top_ids, outputs.top_logprobs)
    chunks = library.kernel(SOURCE, f"logprob_chunks<{c_type}>")
    finish = library.kernel(SOURCE, f"logprob_rows<{c_type}>")
    return [
        Launch(chunks, Dim3(wanted[1], rows), Dim3(256), (*shared, i32(stride))),
        Launch(finish, Dim3(rows), Dim3(256), (*shared, *results, i32(stride), i32(wanted[1]))),
    ]
