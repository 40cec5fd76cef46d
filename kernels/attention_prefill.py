"""Prefill attention over ragged prompt segments with paged prefixes (attention_prefill.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.compiler import CompileUnit
from kernels.device import DeviceLimits
from kernels.launch import Dim3, KernelLibrary, Launch, f32, i32
from kernels.tensor import DType, Tensor, expect

SOURCE = "attention_prefill.cu"
PAGE_SIZE = 64
TILE_INTS = 8
"""Numbers of one tile in the list that tile_list makes."""


@dataclass(frozen=True, slots=True)
class PrefillVariant:
    """Tile shape for one head size."""

    head_dim: int
    warps: int
    tiles_m: int
    """16-row tiles per warp."""
    keys: int
    """Keys per stage; divides the page."""
    min_blocks: int
    when: str

    @property
    def rows(self) -> int:
        """Packed query rows per block."""
        return self.warps * self.tiles_m * 16

    @property
    def shared_bytes(self) -> int:
        """The query tile and two stages of keys and values."""
        return self.rows * self.head_dim * 2 + 4 * self.keys * self.head_dim * 2

    @property
    def expression(self) -> str:
        shape = f"{self.head_dim}, {self.warps}, {self.tiles_m}, {self.keys}, {self.min_blocks}"
        return f"attention_prefill<{shape}>"


VARIANTS = (
    PrefillVariant(64, 4, 2, 64, 2, "always"),
    PrefillVariant(128, 4, 2, 64, 2, "98 KB of shared memory: every device from 8.0 on"),
    PrefillVariant(256, 8, 1, 32, 1, "128 KB of shared memory"),
    PrefillVariant(256, 4, 1, 32, 1, "less shared memory"),
)

_SPILLS_A_LITTLE = frozenset({VARIANTS[1].expression})
"""4 to 16 bytes on sm_80 and sm_100a (none on sm_90a): less than what smaller tiles would cost."""

UNITS = tuple(CompileUnit(SOURCE, (v.expression,), (), _SPILLS_A_LITTLE) for v in VARIANTS)


def pick_variant(limits: DeviceLimits, head_dim: int) -> PrefillVariant:
    """The first variant of this head size that fits. Raises ValueError if there is none."""
    for variant in VARIANTS:
        fits = variant.shared_bytes + 2048 <= limits.shared_bytes_per_block
        if variant.head_dim == head_dim and fits:
            return variant
    raise ValueError(
        f"{SOURCE}: no variant for head_dim {head_dim} in {limits.shared_bytes_per_block} B of shared memory"
    )


def tile_list(
    slots: Sequence[int], lengths: Sequence[int], starts: Sequence[int], group: int, variant: PrefillVariant
) -> NDArray[np.int32]:
    """The query tiles of a ragged pass, int32 [tiles, 8]: those with the most keys first.

    Segment i is lengths[i] rows of slot slots[i] from position starts[i] on; segments follow each other in
    the query rows. group: query heads per kv head.
    """
    parts = []
    first_row = 0
    for slot, length, start in zip(slots, lengths, starts, strict=True):
        packed = np.arange(0, length * group, variant.rows, dtype=np.int32)
        part = np.zeros((len(packed), TILE_INTS), np.int32)
        part[:, 0:4] = (slot, first_row, length, start)
        part[:, 4] = packed
        parts.append(part)
        first_row += length
    tiles = np.concatenate(parts) if parts else np.zeros((0, TILE_INTS), np.int32)
    last_packed = np.minimum(tiles[:, 4] + variant.rows, tiles[:, 2] * group) - 1
    cost = tiles[:, 3] + last_packed // group
    return tiles[np.argsort(-cost, kind="stable")]


def most_tiles(rows: int, segments: int, group: int, variant: PrefillVariant) -> int:
    """Most tiles that `segments` segments of `rows` rows in all can need: the grid of a token bucket."""
    return rows * group // variant.rows + min(segments, rows)


def attention_prefill(
    library: KernelLibrary,
    limits: DeviceLimits,
    *,
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    n_tiles: Tensor,
    out: Tensor,
    scale: float,
    window: int | None = None,
) -> Launch:
    """Causal softmax(scale · q·k) · v of the rows that the tiles cover; other rows are not written.

    query, out       bf16 [rows, n_heads, head_dim], head_dim 64, 128 or 256
    k_pages, v_pages bf16 [pages, n_kv_heads, 64, head_dim]; the segments' own keys are in them already
    block_table      int32 [slots, width]
    tiles            int32 [most tiles, 8] from tile_list, made for pick_variant's variant
    n_tiles          int32 [1]: how many of them count
    window           keys a row sees, its own included; None: all before it

    Raises ValueError for shapes that do not fit.
    """
    rows, n_heads, head_dim = query.shape
    n_kv_heads = k_pages.shape[1]
    expect(SOURCE, "query", query, DType.BF16, (rows, n_heads, head_dim))
    expect(SOURCE, "out", out, DType.BF16, query.shape)
    expect(SOURCE, "k_pages", k_pages, DType.BF16, (None, n_kv_heads, PAGE_SIZE, head_dim))
    expect(SOURCE, "v_pages", v_pages, DType.BF16, k_pages.shape)
    expect(SOURCE, "block_table", block_table, DType.I32, (None, None))
    expect(SOURCE, "tiles", tiles, DType.I32, (None, TILE_INTS))
    expect(SOURCE, "n_tiles", n_tiles, DType.I32, (1,))
    if n_heads % n_kv_heads:
        raise ValueError(f"{SOURCE}: {n_heads} heads cannot share {n_kv_heads} kv heads evenly")
    variant = pick_variant(limits, head_dim)
    kernel = library.kernel(SOURCE, variant.expression, dynamic_shared_bytes=variant.shared_bytes)
    arguments = (
        query, k_pages, v_pages, block_table, tiles, n_tiles, out, i32(n_heads), i32(n_kv_heads),
        i32(block_table.shape[1]), i32(window or 0), f32(scale),
    )  # fmt: skip
    grid = Dim3(n_kv_heads, tiles.shape[0])
    return Launch(kernel, grid, Dim3(variant.warps * 32), arguments, shared_bytes=variant.shared_bytes)
