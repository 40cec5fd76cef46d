"""Token embeddings gathered into the residual stream (embedding.cu)."""

from __future__ import annotations

from kernels.compiler import CompileUnit
from kernels.launch import Dim3, KernelLibrary, Launch, f32, i32
from kernels.tensor import DType, Tensor, expect

SOURCE = "embedding.cu"
EXPRESSION = "embed"
UNITS = (CompileUnit(SOURCE, (EXPRESSION,)),)


def embed(
    library: KernelLibrary,
    *,
    table: Tensor,
    out: Tensor,
    tokens: Tensor | None = None,
    row_slot: Tensor | None = None,
    slot_token: Tensor | None = None,
    scale: float = 1.0,
) -> Launch:
    """out[r] = table[token of row r] · scale.

    table   bf16 [vocab, hidden], hidden a multiple of 8
    out     bf16 [rows, hidden]
    tokens  int32 [rows]; or else
    row_slot, slot_token  int32 [rows], int32 [slots]: row r takes slot_token[row_slot[r]]

    Rows with slot −1 or an id outside the table become zeros. Raises ValueError for shapes that do not fit.
    """
    rows, hidden = out.shape
    vocab = table.shape[0]
    expect(SOURCE, "table", table, DType.BF16, (vocab, hidden))
    expect(SOURCE, "out", out, DType.BF16, (rows, hidden))
    if hidden % 8:
        raise ValueError(f"{SOURCE}: hidden {hidden} must be a multiple of 8")
    if (tokens is None) == (row_slot is None) or (row_slot is None) != (slot_token is None):
        raise ValueError(f"{SOURCE}: give either tokens, or row_slot and slot_token")
    if tokens is not None:
        expect(SOURCE, "tokens", tokens, DType.I32, (rows,))
    if row_slot is not None and slot_token is not None:
        expect(SOURCE, "row_slot", row_slot, DType.I32, (rows,))
        expect(SOURCE, "slot_token", slot_token, DType.I32, (None,))
    threads = min(256, -(-hidden // 256) * 32)
    arguments = (table, tokens, row_slot, slot_token, out, i32(vocab), i32(hidden), f32(scale))
    return Launch(library.kernel(SOURCE, EXPRESSION), Dim3(rows), Dim3(threads), arguments)
