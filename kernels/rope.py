"""Bias, q/k RMSNorm, rotary embedding and the KV page write, from merged q|k|v rows (rope.cu)."""

from __future__ import annotations

from dataclasses import dataclass

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
    CompileUnit(SOURCE, tuple(f"rope_and_quantise<{d}>" for d in HEAD_DIMS)),
)
_WARPS = 4
_QUANTISING_WARPS = 8
_CHUNK_ROWS = 64


@dataclass(frozen=True, slots=True)
class HeadInput:
    """Raw rows of q|k|v, and what makes attention's queries, keys and values of them."""

    qkv: Tensor
    """bf16 [rows, (n_heads + 2 · n_kv_heads) · head_dim]: q heads, k heads, v heads."""
    cosines: Tensor
    """float32 [max_position, rotated / 2]: the first `rotated` elements of a head turn, element i with
    i + rotated / 2; rotated / 2 a multiple of head_dim / 32."""
    sines: Tensor
    bias: Tensor | None = None
    """bf16, one row of qkv; added to the scaled rows."""
    weight_scale: Tensor | None = None
    """float32, one row of qkv; rows are multiplied by it and by their row_scale first."""
    row_scale: Tensor | None = None
    """float32 [rows]."""
    q_norm: Tensor | None = None
    """bf16 [head_dim], with k_norm: RMSNorm of each head times (norm_offset + weight)."""
    k_norm: Tensor | None = None
    epsilon: float = 1e-6
    norm_offset: float = 0.0

    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of the kernels' arguments."""
        scales = self.weight_scale, self.row_scale
        return (self.qkv, self.bias, *scales, self.q_norm, self.k_norm, self.cosines, self.sines)

    def expect_shapes(self, source: str, rows: int, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
        """Raises ValueError for shapes that do not fit."""
        width, half = (n_heads + 2 * n_kv_heads) * head_dim, self.cosines.shape[1]
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"{source}: head_dim {head_dim} is not among {HEAD_DIMS}")
        if half % (head_dim // 32) or not 0 < 2 * half <= head_dim:
            raise ValueError(f"{source}: {2 * half} of {head_dim} elements cannot be rotated")
        expect(source, "qkv", self.qkv, DType.BF16, (rows, width))
        expect(source, "cosines", self.cosines, DType.F32, (None, half))
        expect(source, "sines", self.sines, DType.F32, self.cosines.shape)
        for one, other in (("q_norm", "k_norm"), ("weight_scale", "row_scale")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise ValueError(f"{source}: {one} and {other} come together")
        wanted = {
            "bias": (DType.BF16, width), "weight_scale": (DType.F32, width), "row_scale": (DType.F32, rows),
            "q_norm": (DType.BF16, head_dim), "k_norm": (DType.BF16, head_dim),
        }  # fmt: skip
        for name, (dtype, size) in wanted.items():
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None:
                expect(source, name, tensor, dtype, (size,))


def expect_pages(
    source: str,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    head_dim: int,
) -> None:
    """Raises ValueError unless these are bf16 pages, or e4m3 pages with scales."""
    pages, n_kv_heads = k_pages.shape[:2]
    quantised = k_pages.dtype is DType.E4M3
    dtype = DType.E4M3 if quantised else DType.BF16
    expect(source, "k_pages", k_pages, dtype, (pages, n_kv_heads, PAGE_SIZE, head_dim))
    expect(source, "v_pages", v_pages, dtype, k_pages.shape)
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if (scales is not None) != quantised:
            raise ValueError(f"{source}: {name} belong to e4m3 pages")
        if scales is not None:
            expect(source, name, scales, DType.F32, (pages, n_kv_heads))


def rope_and_write(
    library: KernelLibrary,
    *,
    heads: HeadInput,
    row_slot: Tensor,
    block_table: Tensor,
    q_out: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    row_position: Tensor | None = None,
    slot_position: Tensor | None = None,
    slot_active: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Launch:
    """Prepares attention's inputs of one layer.

    heads            the raw rows and what makes q, k and v of them
    row_slot         int32 [rows]; rows with −1 write nothing
    row_position     int32 [rows] (prefill); or else slot_position and slot_active, int32 [slots] (decode):
                     rows of inactive slots write nothing
    block_table      int32 [slots, width]: page of positions 64·i … 64·i + 63
    q_out            bf16 [rows, n_heads, head_dim]
    k_pages, v_pages bf16 [pages, n_kv_heads, 64, head_dim]; or e4m3, for prefill: then a segment's rows
                     follow each other, and a slot has one segment
    k_scales, v_scales  float32 [pages, n_kv_heads], with e4m3: powers of two. A page's first position sets
                     its scale; later ones may raise it, and what the page holds is rounded again

    Raises ValueError for shapes that do not fit.
    """
    rows, n_heads, head_dim = q_out.shape
    n_kv_heads = k_pages.shape[1]
    heads.expect_shapes(SOURCE, rows, n_heads, n_kv_heads, head_dim)
    expect_pages(SOURCE, k_pages, v_pages, k_scales, v_scales, head_dim)
    expect(SOURCE, "row_slot", row_slot, DType.I32, (rows,))
    expect(SOURCE, "block_table", block_table, DType.I32, (None, None))
    expect(SOURCE, "q_out", q_out, DType.BF16, (rows, n_heads, head_dim))
    slots, n_all = block_table.shape[0], n_heads + 2 * n_kv_heads
    if row_position is not None:
        expect(SOURCE, "row_position", row_position, DType.I32, (rows,))
    elif slot_position is not None and slot_active is not None:
        expect(SOURCE, "slot_position", slot_position, DType.I32, (slots,))
        expect(SOURCE, "slot_active", slot_active, DType.I32, (slots,))
    else:
        raise ValueError(f"{SOURCE}: give either row_position, or slot_position and slot_active")
    raw = (*heads.tensors(), row_slot, row_position)
    numbers = (
        i32(n_heads), i32(n_kv_heads), i32(heads.cosines.shape[1]), i32(block_table.shape[1]),
        f32(heads.epsilon), f32(heads.norm_offset),
    )  # fmt: skip
    if k_scales is not None:
        if row_position is None:
            raise ValueError(f"{SOURCE}: e4m3 pages need row_position; decode has attention_step")
        kernel = library.kernel(SOURCE, f"rope_and_quantise<{head_dim}>")
        pages = (block_table, q_out, k_pages, v_pages, k_scales, v_scales, i32(rows))
        grid = Dim3(n_all, -(-rows // _CHUNK_ROWS))
        return Launch(kernel, grid, Dim3(_QUANTISING_WARPS * 32), (*raw, *pages, *numbers))
    per_warp = _HEADS_PER_WARP[head_dim][rows >= _MANY_ROWS]
    kernel = library.kernel(SOURCE, f"rope_and_write<{head_dim}, {per_warp}>")
    places = (slot_position, slot_active, block_table, q_out, k_pages, v_pages)
    grid = Dim3(-(-n_all // (_WARPS * per_warp)), rows)
    return Launch(kernel, grid, Dim3(_WARPS * 32), (*raw, *places, *numbers))
