"""Prefill attention over ragged prompt segments with paged prefixes: attention_prefill.cu, and on Hopper
attention_prefill_wgmma.cu, which answers for bf16 pages and head sizes 64 and 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.compiler import CompileUnit
from kernels.device import DeviceLimits
from kernels.launch import Argument, Dim3, KernelLibrary, Launch, f32, i32
from kernels.tensor import DType, Tensor, expect
from kernels.tensor_map import page_map

SOURCE = "attention_prefill.cu"
HOPPER_SOURCE = "attention_prefill_wgmma.cu"
PAGE_SIZE = 64
TILE_INTS = 8
"""Numbers of one tile in the list that tile_list makes."""


@dataclass(frozen=True, slots=True)
class PrefillVariant:
    """Tile shape for one head size."""

    head_dim: int
    warps: int
    """Of each part."""
    tiles_m: int
    """16-row tiles per warp."""
    keys: int
    """Keys per stage; divides the page."""
    min_blocks: int
    parts: int
    """Parts of a block that share a tile's keys."""
    when: str

    @property
    def rows(self) -> int:
        """Packed query rows per block."""
        return self.warps * self.tiles_m * 16

    @property
    def threads(self) -> int:
        return self.warps * self.parts * 32

    @property
    def shared_bytes(self) -> int:
        """The query tile and, for each part, two stages of keys and values."""
        return self.rows * self.head_dim * 2 + self.parts * 4 * self.keys * self.head_dim * 2

    def expression(self, pages: DType) -> str:
        """The kernel for pages of this type."""
        shape = f"{self.head_dim}, {self.warps}, {self.tiles_m}, {self.keys}, {self.min_blocks}, {self.parts}"
        return f"attention_prefill<{shape}, {pages.value}>"


@dataclass(frozen=True, slots=True)
class HopperVariant:
    """One head size on wgmma."""

    head_dim: int
    stages: int
    """Pages in each of the rings of keys and of values."""
    turns: bool
    """Whether the two consumers take turns at the tensor cores."""

    rows = 128
    """Packed query rows per block, 64 for each consumer."""
    threads = 384

    @property
    def shared_bytes(self) -> int:
        """Both rings, the queries and the results."""
        return (2 * self.stages * PAGE_SIZE + 2 * self.rows) * self.head_dim * 2

    @property
    def expression(self) -> str:
        return f"attention_prefill_wgmma<{self.head_dim}, {self.stages}, {str(self.turns).lower()}>"


HOPPER_VARIANTS = (HopperVariant(64, 8, True), HopperVariant(128, 5, True))

VARIANTS = (
    PrefillVariant(64, 4, 2, 64, 2, 1, "always"),
    PrefillVariant(64, 4, 2, 64, 1, 2, "few tiles"),
    PrefillVariant(128, 4, 2, 64, 2, 1, "98 KB of shared memory: every device from 8.0 on"),
    PrefillVariant(128, 4, 2, 64, 1, 2, "few tiles, and 160 KB of shared memory"),
    PrefillVariant(256, 8, 1, 32, 1, 1, "128 KB of shared memory"),
    PrefillVariant(256, 4, 1, 32, 1, 1, "less shared memory"),
)

FEW_WAVES = 2
"""Blocks per multiprocessor up to which a tile's keys are shared by two parts of a block."""


def _units() -> tuple[CompileUnit, ...]:
    """Variants of head size 128 spill 4 to 52 bytes here and there: less than smaller tiles would cost."""
    pairs = [(v, v.expression(pages)) for v in VARIANTS for pages in (DType.BF16, DType.E4M3)]
    return tuple(
        CompileUnit(SOURCE, (name,), (), frozenset({name} if v.head_dim == 128 else ())) for v, name in pairs
    )


UNITS = (*_units(), *(CompileUnit(HOPPER_SOURCE, (v.expression,)) for v in HOPPER_VARIANTS))


def pick_variant(limits: DeviceLimits, head_dim: int, blocks: int | None = None) -> PrefillVariant:
    """The variant for a launch of so many blocks; None: more than any. All of them have the same `rows`.

    Raises ValueError if no variant of this head size fits.
    """
    few = blocks is not None and blocks <= FEW_WAVES * limits.multiprocessors
    fitting = [
        variant
        for variant in VARIANTS
        if variant.head_dim == head_dim and variant.shared_bytes + 2048 <= limits.shared_bytes_per_block
    ]
    if not fitting:
        room = f"{limits.shared_bytes_per_block} B of shared memory"
        raise ValueError(f"{SOURCE}: no variant for head_dim {head_dim} in {room}")
    shared = [v for v in fitting if few and v.parts > 1 and v.rows == fitting[0].rows]
    return shared[0] if shared else fitting[0]


def pick_hopper_variant(limits: DeviceLimits, head_dim: int, pages: DType) -> HopperVariant | None:
    """The wgmma arm for this head size and type of pages; None where there is none."""
    if limits.arch != "sm_90a" or pages is not DType.BF16:
        return None
    return next((variant for variant in HOPPER_VARIANTS if variant.head_dim == head_dim), None)


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
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    variant: PrefillVariant | HopperVariant | None = None,
) -> Launch:
    """Causal softmax(scale · q·k) · v of the rows that the tiles cover; other rows are not written.

    query, out         bf16 [rows, n_heads, head_dim], head_dim 64, 128 or 256
    k_pages, v_pages   bf16 or e4m3 [pages, n_kv_heads, 64, head_dim]; the segments' own keys are in them
    k_scales, v_scales float32 [pages, n_kv_heads], with e4m3 pages only: powers of two
    block_table        int32 [slots, width]
    tiles              int32 [most tiles, 8] from tile_list, made for pick_variant's variant
    n_tiles            int32 [1]: how many of them count
    window             keys a row sees, its own included; None: all before it
    variant            None takes Hopper's where there is one, else pick_variant's for this many rows

    Raises ValueError for shapes that do not fit.
    """
    rows, n_heads, head_dim = query.shape
    n_kv_heads = k_pages.shape[1]
    expect(SOURCE, "query", query, DType.BF16, (rows, n_heads, head_dim))
    expect(SOURCE, "out", out, DType.BF16, query.shape)
    _expect_pages(k_pages, v_pages, k_scales, v_scales, head_dim)
    expect(SOURCE, "block_table", block_table, DType.I32, (None, None))
    expect(SOURCE, "tiles", tiles, DType.I32, (None, TILE_INTS))
    expect(SOURCE, "n_tiles", n_tiles, DType.I32, (1,))
    if n_heads % n_kv_heads:
        raise ValueError(f"{SOURCE}: {n_heads} heads cannot share {n_kv_heads} kv heads evenly")
    numbers = (i32(n_heads), i32(n_kv_heads), i32(block_table.shape[1]), i32(window or 0), f32(scale))
    lists = (block_table, tiles, n_tiles, out, *numbers)
    if variant is None:
        variant = pick_hopper_variant(limits, head_dim, k_pages.dtype)
    if variant is None:
        variant = pick_variant(limits, head_dim)
        variant = pick_variant(limits, head_dim, -(-rows * n_heads // variant.rows))
    shared_bytes = variant.shared_bytes
    if isinstance(variant, HopperVariant):
        kernel = library.kernel(HOPPER_SOURCE, variant.expression, dynamic_shared_bytes=shared_bytes)
        arguments: tuple[Argument, ...] = (query, page_map(k_pages), page_map(v_pages), *lists)
        grid = Dim3(min(limits.multiprocessors, tiles.shape[0] * n_kv_heads))
    else:
        name = variant.expression(k_pages.dtype)
        kernel = library.kernel(SOURCE, name, dynamic_shared_bytes=shared_bytes)
        arguments = (query, k_pages, v_pages, k_scales, v_scales, *lists)
        grid = Dim3(n_kv_heads, tiles.shape[0])
    return Launch(kernel, grid, Dim3(variant.threads), arguments, shared_bytes=shared_bytes)


def _expect_pages(
    k_pages: Tensor, v_pages: Tensor, k_scales: Tensor | None, v_scales: Tensor | None, head_dim: int
) -> None:
    pages, n_kv_heads = k_pages.shape[:2]
    dtype = DType.E4M3 if k_pages.dtype is DType.E4M3 else DType.BF16
    expect(SOURCE, "k_pages", k_pages, dtype, (pages, n_kv_heads, PAGE_SIZE, head_dim))
    expect(SOURCE, "v_pages", v_pages, dtype, k_pages.shape)
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if (scales is not None) != (dtype is DType.E4M3):
            raise ValueError(f"{SOURCE}: {name} belongs to e4m3 pages, and they need it")
        if scales is not None:
            expect(SOURCE, name, scales, DType.F32, (pages, n_kv_heads))
