"""2 to 8 rows times a bf16 weight on Hopper, streamed by blocks that stay (skinny_rows.cu).

The arm of kernels/skinny.py for that case: it checks the shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.compiler import CompileUnit
from kernels.device import DeviceLimits
from kernels.fused import Finish
from kernels.launch import Dim3, KernelLibrary, Launch, i32
from kernels.tensor import DType, Tensor

SOURCE = "skinny_rows.cu"
ARCH = "sm_90a"
"""The only one that has a kernel."""
MAX_ROWS = 8
LEAST_BYTES = 8 << 20
"""Of a weight: what is smaller has not been measured, and stays in skinny.cu."""
MOST_BATCH = 2
"""Groups of 16 rows whose sums a block joins at once, at most."""
_GROUP = 16
_CHUNK = 32
"""Of k: 64 bytes of a row."""


@dataclass(frozen=True, slots=True)
class RowsShape:
    """How a block's warps share groups of 16 rows, and how far its ring reaches ahead."""

    warps: int
    """That multiply; one more streams."""
    steps: int
    """Chunks of 32 of k that a warp takes of a group at most; `piece` divides them."""
    piece: int
    """Of them, chunks of a warp in a stage of the ring."""
    stages: int
    """Of the ring, at most."""
    spread: int = 1
    """Blocks per multiprocessor."""
    resident: int = 1
    """Blocks that a multiprocessor has registers for."""

    @property
    def piece_bytes(self) -> int:
        """Of a row, in a stage."""
        return 2 * _CHUNK * self.warps * self.piece

    @property
    def stage_bytes(self) -> int:
        """Of rows 64 bytes further apart than they are long, and two barriers."""
        return _GROUP * (self.piece_bytes + 64) + 16

    @property
    def most_k(self) -> int:
        return _CHUNK * self.warps * self.steps


SHAPES = {
    Finish.STORE: (RowsShape(8, 8, 2, 4, spread=2, resident=2), RowsShape(8, 16, 4, 6)),
    Finish.ADD: (RowsShape(8, 8, 4, 2, resident=2), RowsShape(8, 16, 4, 6), RowsShape(16, 12, 2, 6)),
    Finish.SWIGLU: (RowsShape(4, 16, 4, 5, spread=2, resident=2), RowsShape(8, 16, 4, 5)),
}
"""The first whose most_k suffices. With 8 rows the products of a layer of Qwen3-1.7B's shape take an H200
30.4 µs in a row (33.3 in skinny.cu; 23.6 as a copy of their bytes); each alone: 4096 × 2048 5.7 (6.4),
2048 × 2048 with the add 3.2 (4.2), 12288 × 2048 with SwiGLU 13.6 (14.7), 2048 × 6144 with the add 9.2 (8.8).
Of the 8B shape 4096 × 4096 with the add takes 10.0 (11.6)."""


@dataclass(frozen=True, slots=True)
class RowsVariant:
    """A kernel."""

    finish: Finish
    shape: RowsShape

    @property
    def expression(self) -> str:
        shape = self.shape
        numbers = f"{shape.warps}, {shape.steps}, {shape.piece}, {shape.resident}"
        return f"skinny_rows<{self.finish.value}, {numbers}>"

    @property
    def groups(self) -> int:
        """Groups of 16 rows of the weight that make 16 columns of y."""
        return 2 if self.finish is Finish.SWIGLU else 1

    def split(self, limits: DeviceLimits, rows: int, n: int, k: int) -> RowsSplit:
        """How a launch divides the work."""
        shape, units = self.shape, n // _GROUP
        blocks = min(units, shape.spread * limits.multiprocessors)
        most = -(-units // blocks)
        pieces = most * self.groups * -(-2 * k // shape.piece_bytes)
        shift = (rows - 1).bit_length()
        batch = min(most, MOST_BATCH, shape.warps * 32 >> (4 + shift))
        stages = min(pieces, shape.stages)
        # 6 stages of 16 warps and two batches of two groups of 8 rows would be 3 KB more than Hopper has.
        room = limits.shared_bytes_per_block - stages * shape.stage_bytes
        batch = max(1, min(batch, room // self._batch_bytes(shift)))
        return RowsSplit(blocks, units // blocks, units % blocks, stages, batch, shift)

    def shared_bytes(self, split: RowsSplit) -> int:
        """Of a block: the ring and its barriers, and two batches' sums."""
        return split.stages * self.shape.stage_bytes + split.batch * self._batch_bytes(split.shift)

    def _batch_bytes(self, shift: int) -> int:
        """Of the float32 sums of a group (with SWIGLU of two), twice: one is written as the other is read."""
        return 2 * 4 * (self.groups * self.shape.warps * _GROUP << shift)


@dataclass(frozen=True, slots=True)
class RowsSplit:
    """A launch's division of groups of 16 rows (with SWIGLU of pairs of groups)."""

    blocks: int
    each: int
    """Groups of a block."""
    extra: int
    """Blocks that take one more."""
    stages: int
    """Of the ring."""
    batch: int
    """Groups whose sums are joined at once."""
    shift: int
    """2^shift rows of sums are kept."""


VARIANTS = tuple(RowsVariant(finish, shape) for finish, shapes in SHAPES.items() for shape in shapes)
UNITS = tuple(CompileUnit(SOURCE, (variant.expression,)) for variant in VARIANTS)


def pick_rows(
    limits: DeviceLimits, rows: int, n: int, k: int, out: DType, finish: Finish
) -> RowsVariant | None:
    """The kernel for x of so many rows times a bf16 weight [n, k] (with SWIGLU [2 · n, k]).

    None where there is none, or it is not the faster way.
    """
    weight_bytes = 2 * n * k * (2 if finish is Finish.SWIGLU else 1)
    if limits.arch != ARCH or not 2 <= rows <= MAX_ROWS:
        return None
    if out is not DType.BF16 or weight_bytes < LEAST_BYTES:
        return None
    for shape in SHAPES[finish]:
        if k <= shape.most_k:
            variant = RowsVariant(finish, shape)
            fits = variant.shared_bytes(variant.split(limits, rows, n, k)) <= limits.shared_bytes_per_block
            return variant if fits else None
    return None


def skinny_rows(
    library: KernelLibrary,
    limits: DeviceLimits,
    variant: RowsVariant,
    *,
    x: Tensor,
    weight: Tensor,
    y: Tensor,
) -> Launch:
    """y = x · weightᵀ, or what the variant's `finish` makes of it.

    x       bf16 [rows ≤ 8, k], k ≤ most_k
    weight  bf16 [n, k], with SWIGLU [2 · n, k], gates first
    y       bf16 [rows, n]

    Raises ValueError for a variant that the device has too little shared memory for.
    """
    (rows, n), k = y.shape, x.shape[1]
    split = variant.split(limits, rows, n, k)
    shared_bytes = variant.shared_bytes(split)
    limits.expect_shared(variant.expression, shared_bytes)
    kernel = library.kernel(SOURCE, variant.expression, dynamic_shared_bytes=shared_bytes)
    numbers = (rows, split.shift, n, k, split.each, split.extra, split.stages, split.batch)
    grid, block = Dim3(split.blocks), Dim3(variant.shape.warps * 32 + 32)
    return Launch(kernel, grid, block, (x, weight, y, *map(i32, numbers)), shared_bytes=shared_bytes)
