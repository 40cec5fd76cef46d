"""Bias, q/k RMSNorm, rotary embedding and the KV page write, from merged q|k|v rows (rope.cu)."""

from __future__ import annotations

from kernels.compiler import CompileUnit
from kernels.launch import Dim3, KernelLibrary, Launch, f32, i32
from kernels.tensor import DType, Tensor, expect

SOURCE = "rope.cu"
HEAD_DIMS = (64, 128, 256)
PAGE_SIZE = 64
_HEADS_PER_WARP = {64: (1, 4), 128: (1, 4), 256: (1, 2)}
_MANY_ROWS = 256
"""From so many rows on a warp takes several heads."""
UNITS = (
    CompileUnit(SOURCE, tuple(f"rope_and_write<{d}, {n}>" for d in HEAD_DIMS for n in _HEADS_PER_WARP[d])),
)
_WARPS = 4


def rope_and_write(
    library: KernelLibrary,
    *,
    qkv: Tensor,
    cosines: Tensor,
    sines: Tensor,
    row_slot: Tensor,
    block_table: Tensor,
    q_out: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    row_position: Tensor | None = None,
    slot_position: Tensor | None = None,
    slot_active: Tensor | None = None,
    bias: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    epsilon: float = 1e-6,
    norm_offset: float = 0.0,
) -> Launch:
    """Prepares attention's inputs of one layer.

    qkv              bf16 [rows, (n_heads + 2 · n_kv_heads) · head_dim]: q heads, k heads, v heads
    cosines, sines   float32 [max_position, rotated / 2]: the first `rotated` elements of a head turn, element
                     i with i + rotated / 2; rotated / 2 a multiple of head_dim / 32
    row_slot         int32 [rows]; rows with −1 write nothing
    row_position     int32 [rows] (prefill); or else slot_position and slot_active, int32 [slots] (decode):
                     rows of inactive slots write nothing
    block_table      int32 [slots, width]: page of positions 64·i … 64·i + 63
    q_out            bf16 [rows, n_heads, head_dim]
    k_pages, v_pages bf16 [pages, n_kv_heads, 64, head_dim]
    bias             bf16, one row of qkv, added first
    q_norm, k_norm   bf16 [head_dim], both or none: RMSNorm of each head times (norm_offset + weight)

    Raises ValueError for shapes that do not fit.
    """
    rows, n_heads, head_dim = q_out.shape
    n_kv_heads = k_pages.shape[1]
    heads = n_heads + 2 * n_kv_heads
    half = cosines.shape[1]
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"{SOURCE}: head_dim {head_dim} is not among {HEAD_DIMS}")
    if half % (head_dim // 32) or not 0 < 2 * half <= head_dim:
        raise ValueError(f"{SOURCE}: {2 * half} of {head_dim} elements cannot be rotated")
    expect(SOURCE, "qkv", qkv, DType.BF16, (rows, heads * head_dim))
    expect(SOURCE, "cosines", cosines, DType.F32, (None, half))
    expect(SOURCE, "sines", sines, DType.F32, cosines.shape)
    expect(SOURCE, "row_slot", row_slot, DType.I32, (rows,))
    expect(SOURCE, "block_table", block_table, DType.I32, (None, None))
    expect(SOURCE, "q_out", q_out, DType.BF16, (rows, n_heads, head_dim))
    expect(SOURCE, "k_pages", k_pages, DType.BF16, (None, n_kv_heads, PAGE_SIZE, head_dim))
    expect(SOURCE, "v_pages", v_pages, DType.BF16, k_pages.shape)
    slots = block_table.shape[0]
    if row_position is not None:
        expect(SOURCE, "row_position", row_position, DType.I32, (rows,))
    elif slot_position is not None and slot_active is not None:
        expect(SOURCE, "slot_position", slot_position, DType.I32, (slots,))
        expect(SOURCE, "slot_active", slot_active, DType.I32, (slots,))
    else:
        raise ValueError(f"{SOURCE}: give either row_position, or slot_position and slot_active")
    if bias is not None:
        expect(SOURCE, "bias", bias, DType.BF16, (heads * head_dim,))
    if (q_norm is None) != (k_norm is None):
        raise ValueError(f"{SOURCE}: q_norm and k_norm come together")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            expect(SOURCE, name, norm, DType.BF16, (head_dim,))
    arguments = (
        qkv, bias, q_norm, k_norm, cosines, sines, row_slot, row_position, slot_position, slot_active,
        block_table, q_out, k_pages, v_pages, i32(n_heads), i32(n_kv_heads), i32(half),
        i32(block_table.shape[1]), f32(epsilon), f32(norm_offset),
    )  # fmt: skip
    per_warp = _HEADS_PER_WARP[head_dim][rows >= _MANY_ROWS]
    kernel = library.kernel(SOURCE, f"rope_and_write<{head_dim}, {per_warp}>")
    return Launch(kernel, Dim3(-(-heads // (_WARPS * per_warp)), rows), Dim3(_WARPS * 32), arguments)
