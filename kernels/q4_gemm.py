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
"""Rows of x that go through the weights at once."""
MAX_CLUSTER = 8
MAX_ROWS = 128
_FIRST_WITH_CLUSTERS = (9, 0)


@dataclass(frozen=True, slots=True)
class Q4GemmVariant:
    """A kernel."""

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

    @property
    def expression(self) -> str:
        shape = f"{self.columns}, {self.warps}, {self.depth}, {self.resident}"
        return f"q4_gemm<{shape}, {str(self.warpgroup).lower()}>"


VARIANTS = (
    Q4GemmVariant(16, 4, 4, 6, True),
    Q4GemmVariant(16, 8, 4, 3, True),
    Q4GemmVariant(16, 8, 4, 3, False),
    Q4GemmVariant(16, 4, 4, 4, False),
    Q4GemmVariant(32, 4, 4, 5, True),
    Q4GemmVariant(32, 8, 4, 3, True),
    Q4GemmVariant(32, 8, 4, 2, False),
    Q4GemmVariant(64, 4, 2, 6, True),
    Q4GemmVariant(64, 4, 4, 4, True),
    Q4GemmVariant(64, 8, 2, 3, True),
    Q4GemmVariant(64, 8, 4, 2, True),
    Q4GemmVariant(64, 8, 4, 2, False),
)

UNITS = (CompileUnit(SOURCE, tuple(variant.expression for variant in VARIANTS)),)


@dataclass(frozen=True, slots=True)
class Q4GemmPlan:
    """How a product is spread over the device."""

    variant: Q4GemmVariant
    cluster: int
    """Blocks that share k."""


def fits(limits: DeviceLimits, rows: int, n: int, k: int) -> bool:
    """Whether q4_gemm is the faster way for y [rows, n], not q4_dequantise and a product in bf16."""
    return rows <= MAX_ROWS


def pick_plan(limits: DeviceLimits, rows: int, n: int, k: int, finish: Finish) -> Q4GemmPlan:
    """The plan for y [rows, n]."""
    variant = next(v for v in VARIANTS if min(rows, SLAB) <= v.columns)
    if limits.compute_capability < _FIRST_WITH_CLUSTERS:
        return Q4GemmPlan(variant, 1)
    blocks = _row_blocks(variant, n, finish) * -(-rows // variant.columns)
    wanted = limits.multiprocessors * variant.resident // blocks
    return Q4GemmPlan(variant, max(1, min(wanted, MAX_CLUSTER, tile_columns(k))))


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

    Scales and scaled weights are rounded to bf16. Raises ValueError for shapes that do not fit.
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
