"""Products with q4_0 weights for up to a few hundred rows, fused with a residual add or SwiGLU (q4_gemm.cu).

Wider batches turn the weight into bf16 first (q4.py) and leave the product to cuBLASLt.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.compiler import CompileUnit
from kernels.device import DeviceLimits
from kernels.launch import Dim3, KernelLibrary, Launch, i32
from kernels.q4 import TILE_COLUMNS, TILE_ROWS, Q4Tiles, expect_tiles, tile_columns
from kernels.skinny import Finish
from kernels.tensor import DType, Tensor, expect

SOURCE = "q4_gemm.cu"
SLAB = 64
"""Most rows of x that go through the weights at once."""
CLUSTERS = (1, 2, 4, 8)
MAX_ROWS = 128
_FIRST_WITH_CLUSTERS = (9, 0)
_SHARED_PER_BLOCK = 1024
"""Bytes that the driver takes of each block's shared memory."""
_PAD = 4


@dataclass(frozen=True, slots=True)
class Q4GemmVariant:
    """A kernel."""

    columns: int
    """Most rows of x in a slab."""
    warps: int
    """Of a block; each has 16 rows of the weight at a time."""
    depth: int
    """Tiles that a warp has on their way at once."""
    resident: int
    """Blocks that a multiprocessor holds at once, as far as registers go."""
    warpgroup: bool
    """With wgmma where there is it (compute capability 9.0); without, with mma.sync everywhere."""

    @property
    def expression(self) -> str:
        shape = f"{self.columns}, {self.warps}, {self.depth}, {self.resident}"
        return f"q4_gemm<{shape}, {str(self.warpgroup).lower()}>"


VARIANTS = (
    Q4GemmVariant(16, 8, 4, 2, True),
    Q4GemmVariant(16, 8, 4, 3, True),
    Q4GemmVariant(16, 12, 4, 1, True),
    Q4GemmVariant(16, 16, 4, 1, True),
    Q4GemmVariant(16, 8, 4, 2, False),
    Q4GemmVariant(16, 8, 4, 3, False),
    Q4GemmVariant(16, 16, 4, 1, False),
    Q4GemmVariant(32, 8, 4, 2, True),
    Q4GemmVariant(32, 8, 3, 3, True),
    Q4GemmVariant(32, 12, 4, 1, True),
    Q4GemmVariant(32, 16, 4, 1, True),
    Q4GemmVariant(64, 8, 4, 2, True),
    Q4GemmVariant(64, 12, 4, 1, True),
    Q4GemmVariant(64, 16, 4, 1, True),
    Q4GemmVariant(64, 8, 3, 2, False),
)

UNITS = (CompileUnit(SOURCE, tuple(variant.expression for variant in VARIANTS)),)


@dataclass(frozen=True, slots=True)
class Q4GemmPlan:
    """How a product is spread over the device."""

    variant: Q4GemmVariant
    cluster: int
    """Blocks that share k."""
    groups: int
    """Clusters for each slab of x; each takes every so-many-th row block."""
    sums_offset: int
    """Of the partial sums in shared memory, in bytes: 0 if they lie over x."""
    shared_bytes: int
    row_blocks: int

    @property
    def rounds(self) -> int:
        """Row blocks of a cluster."""
        return -(-self.row_blocks // self.groups)


def fits(limits: DeviceLimits, rows: int, n: int, k: int) -> bool:
    """Whether q4_gemm is the faster way for y [rows, n], not q4_dequantise and a product in bf16."""
    return limits.compute_capability >= _FIRST_WITH_CLUSTERS and rows <= MAX_ROWS


def pick_plan(limits: DeviceLimits, rows: int, n: int, k: int, finish: Finish) -> Q4GemmPlan:
    """The plan for y [rows, n] that promises to be the fastest. Raises ValueError if x fits in no block."""
    wanted = next(c for c in (16, 32, 64) if min(rows, SLAB) <= c)
    for columns in (wanted, 32, 16):
        plans = [
            plan
            for variant in VARIANTS
            if variant.columns == columns
            for cluster in CLUSTERS
            if (plan := make_plan(limits, variant, cluster, rows, n, k, finish)) is not None
        ]
        if plans and columns <= wanted:
            return min(plans, key=lambda plan: _estimate(limits, plan, rows, k))
    raise ValueError(f"{SOURCE}: {k} of k are too many for this device's shared memory")


def make_plan(
    limits: DeviceLimits,
    variant: Q4GemmVariant,
    cluster: int,
    rows: int,
    n: int,
    k: int,
    finish: Finish,
) -> Q4GemmPlan | None:
    """The plan for a variant and a cluster size; None if the device cannot, or k is too short."""
    has_clusters = limits.compute_capability >= _FIRST_WITH_CLUSTERS
    if cluster > tile_columns(k) or (cluster > 1 and not has_clusters):
        return None
    height = variant.warps * TILE_ROWS
    row_blocks = -(-n // (height // 2 if finish is Finish.SWIGLU else height))
    x_bytes = -(-tile_columns(k) // cluster) * variant.columns * TILE_COLUMNS * 2
    sums_bytes = variant.columns * (height + _PAD) * 4
    slabs = -(-rows // variant.columns)
    for sums_offset, shared_bytes in ((0, max(x_bytes, sums_bytes)), (x_bytes, x_bytes + sums_bytes)):
        if shared_bytes > limits.shared_bytes_per_block:
            continue
        most = max(1, _clusters_at_once(limits, variant, cluster, shared_bytes) // slabs)
        rounds = -(-row_blocks // most)
        if rounds == 1 or sums_offset:
            groups = -(-row_blocks // rounds)
            return Q4GemmPlan(variant, cluster, groups, sums_offset, shared_bytes, row_blocks)
    return None


def _clusters_at_once(limits: DeviceLimits, variant: Q4GemmVariant, cluster: int, shared_bytes: int) -> int:
    """Clusters that run at once. Large ones leave multiprocessors of a GPC over: of 132 they take 128."""
    each = (limits.shared_bytes_per_block + _SHARED_PER_BLOCK) // (shared_bytes + _SHARED_PER_BLOCK)
    usable = limits.multiprocessors - (limits.multiprocessors % 16 if cluster > 2 else 0)
    return max(1, usable * min(each, variant.resident) // cluster)


def _estimate(limits: DeviceLimits, plan: Q4GemmPlan, rows: int, k: int) -> float:
    """Clocks of a multiprocessor."""
    variant = plan.variant
    blocks = plan.groups * plan.cluster * -(-rows // variant.columns)
    beside = -(-blocks // limits.multiprocessors)
    count = -(-tile_columns(k) // plan.cluster)
    work = plan.rounds * beside * count * variant.warps * 40
    x_copies = beside * count * variant.columns * 5
    return work + x_copies + plan.rounds * (1000 + 200 * plan.cluster)


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
    kernel = library.kernel(SOURCE, variant.expression, dynamic_shared_bytes=plan.shared_bytes)
    numbers = (rows, n, weight.k, finish, y.dtype is DType.F32, plan.sums_offset)
    return Launch(
        kernel,
        Dim3(plan.cluster, plan.groups, -(-rows // variant.columns)),
        Dim3(variant.warps * 32),
        (x, weight.quants, weight.scales, y, *map(i32, numbers)),
        shared_bytes=plan.shared_bytes,
        cluster=plan.cluster,
    )
