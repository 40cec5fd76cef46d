"""Products with q4_0 weights for up to a few hundred rows, fused with a residual add or SwiGLU (q4_gemm.cu).

Wider batches turn the weight into bf16 first (q4.py) and leave the product to cuBLASLt.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.compiler import CompileUnit
from kernels.device import DeviceLimits
from kernels.launch import Dim3, KernelLibrary, Launch, i32
from kernels.q4 import TILE_ROWS, Q4Tiles, expect_tiles, tile_columns
from kernels.skinny import Finish
from kernels.tensor import DType, Tensor, expect

SOURCE = "q4_gemm.cu"
SLAB = 64
"""Most rows of x that go through the weights at once."""
MAX_CLUSTER = 8
MAX_ROWS = 64
MAX_ROWS_LARGE = 128
LARGE = 12 << 20
"""Elements of a weight; with SwiGLU of its half."""
_FIRST_WITH_CLUSTERS = (9, 0)
_SMALL = 12 << 20
"""Elements of a weight up to which, and up to 32 rows, smaller blocks are faster on an H200."""
_HEAD = 1 << 16
"""Rows of a weight from which on nothing but its bytes counts."""


@dataclass(frozen=True, slots=True)
class Q4GemmVariant:
    """A kernel, and how many of its blocks to aim at."""

    columns: int
    """Most rows of x in a slab."""
    warps: int
    """Of a block; each has 16 rows of the weight."""
    depth: int
    """Tiles that a warp has on their way at once."""
    resident: int
    """Blocks that a multiprocessor holds at once."""
    warpgroup: bool
    """With wgmma where there is it (compute capability 9.0); without, with mma.sync everywhere."""
    blocks: float
    """For each multiprocessor, at most, before k is split any further."""
    max_cluster: int

    @property
    def expression(self) -> str:
        shape = f"{self.columns}, {self.warps}, {self.depth}, {self.resident}"
        return f"q4_gemm<{shape}, {str(self.warpgroup).lower()}>"


_SMALL_16 = Q4GemmVariant(16, 4, 4, 6, True, 2, 8)
_LARGE_16 = Q4GemmVariant(16, 8, 4, 3, True, 2.2, 8)
_HEAD_16 = Q4GemmVariant(16, 8, 4, 3, False, 2.2, 8)
_SMALL_32 = Q4GemmVariant(32, 4, 4, 5, True, 2, 8)
_LARGE_32 = Q4GemmVariant(32, 8, 4, 3, True, 2.2, 6)
_ALL_64 = Q4GemmVariant(64, 8, 4, 2, True, 1.5, 6)
VARIANTS = (_SMALL_16, _LARGE_16, _HEAD_16, _SMALL_32, _LARGE_32, _ALL_64)
"""What won on an H200 of 2 to 5 for each number of columns, with clusters of 1, 2, 3, 4, 6 and 8, for the
products of Qwen3-1.7B and 8B. With 64 rows blocks of 4 warps take up to 1.3 times as long (8B's head: 314
against 246 µs), as each reads all of x. Keeping x in shared memory and going through the weights instead took
longer too: 17.0 against 15.2 µs for 8B's q|k|v, 15.8 against 15.5 for 1.7B's gate|up."""

_SPILLS_A_LITTLE = frozenset({_LARGE_32.expression})
"""12 bytes on sm_100a, for a third block on each multiprocessor."""

UNITS = (CompileUnit(SOURCE, tuple(variant.expression for variant in VARIANTS), (), _SPILLS_A_LITTLE),)


@dataclass(frozen=True, slots=True)
class Q4GemmPlan:
    """How a product is spread over the device."""

    variant: Q4GemmVariant
    cluster: int
    """Blocks that share k."""


def fits(limits: DeviceLimits, rows: int, n: int, k: int) -> bool:
    """Whether q4_gemm is the faster way for y [rows, n], not q4_dequantise and a product in bf16.

    By sums of what was measured on an H200: for 128 rows and a weight of 12288 × 2048 2 · 15.5 µs against
    17.7 + 16.4, for one of 2048 × 2048 2 · 6.3 against 3.4 + 6.4.
    """
    if limits.compute_capability < _FIRST_WITH_CLUSTERS:
        return False
    return rows <= (MAX_ROWS_LARGE if n * k >= LARGE else MAX_ROWS)


def pick_plan(limits: DeviceLimits, rows: int, n: int, k: int, finish: Finish) -> Q4GemmPlan:
    """The plan for y [rows, n]."""
    height = 2 * n if finish is Finish.SWIGLU else n
    if rows > 32:
        variant = _ALL_64
    elif height * k <= _SMALL:
        variant = _SMALL_16 if rows <= 16 else _SMALL_32
    elif rows > 16:
        variant = _LARGE_32
    else:
        variant = _HEAD_16 if height >= _HEAD else _LARGE_16
    if limits.compute_capability < _FIRST_WITH_CLUSTERS:
        return Q4GemmPlan(variant, 1)
    blocks = _row_blocks(variant, n, finish) * -(-rows // variant.columns)
    cluster = int(limits.multiprocessors * variant.blocks) // blocks
    if blocks <= 1.5 * limits.multiprocessors:
        cluster = max(cluster, 2)
    # Of 5 and 7 nothing was measured.
    cluster = max(c for c in (1, 2, 3, 4, 6, 8) if c <= max(1, min(cluster, variant.max_cluster)))
    return Q4GemmPlan(variant, min(cluster, tile_columns(k)))


def q4_gemm(
    library: KernelLibrary,
    limits: DeviceLimits,
    *,
    x: Tensor,
    weight: Q4Tiles,
    y: Tensor,
    finish: Finish = Finish.STORE,
    plan: Q4GemmPlan | None = None,
) -> Launch:
    """y = x · weightᵀ, or what `finish` makes of it, summed in float32.

    x       bf16 [rows, k], finite
    weight  [n, k]; with SWIGLU [2 · n, k], gates first; the launch right before must not have written it
    y       bf16 or float32 [rows, n]
    plan    None: pick_plan's

    Scales and scaled weights are rounded to bf16: 2.1e-3 of y's norm, where weights rounded once make 1.7e-3.
    Raises ValueError for shapes that do not fit.
    """
    rows, n = y.shape
    expect_tiles(SOURCE, "weight", weight)
    height = 2 * n if finish is Finish.SWIGLU else n
    if weight.n != height or n % TILE_ROWS or y.dtype not in (DType.BF16, DType.F32):
        raise ValueError(
            f"{SOURCE}: a weight of {weight.n} rows cannot give {y.dtype.value} [{rows}, {n}] "
            f"by {finish.name}; n must be a multiple of {TILE_ROWS}"
        )
    expect(SOURCE, "x", x, DType.BF16, (rows, weight.k))
    expect(SOURCE, "y", y, y.dtype, (rows, n))
    plan = plan or pick_plan(limits, rows, n, weight.k, finish)
    variant = plan.variant
    grid = Dim3(plan.cluster, _row_blocks(variant, n, finish), -(-rows // variant.columns))
    kernel = library.kernel(SOURCE, variant.expression)
    numbers = (i32(rows), i32(n), i32(weight.k), i32(finish), i32(y.dtype is DType.F32))
    arguments = (x, weight.quants, weight.scales, y, *numbers)
    return Launch(kernel, grid, Dim3(variant.warps * 32), arguments, cluster=plan.cluster)


def _row_blocks(variant: Q4GemmVariant, n: int, finish: Finish) -> int:
    tiles = variant.warps // 2 if finish is Finish.SWIGLU else variant.warps
    return -(-n // (tiles * TILE_ROWS))
