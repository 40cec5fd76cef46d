"""One row times a q4_0 weight on Hopper, streamed by blocks that stay (skinny_stream.cu).

The arm of kernels/skinny.py for that case: it checks the shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.compiler import CompileUnit
from kernels.device import DeviceLimits
from kernels.fused import Finish, FusedNorm
from kernels.launch import Dim3, KernelLibrary, Launch, f32, i32
from kernels.q4 import TILE_ROWS, Q4Tiles, tile_columns
from kernels.tensor import DType, Tensor

SOURCE = "skinny_stream.cu"
ARCH = "sm_90a"
"""The only one that has a kernel."""
MOST_BATCH = 8
"""Groups of 16 rows whose sums a block joins at once, at most."""
_C_TYPES = {DType.F32: "float", DType.BF16: "bf16"}
_TILE_BYTES = 576
_DIGIT_BYTES = 192
"""Of x for a tile: three digits of 64 elements."""


@dataclass(frozen=True, slots=True)
class StreamShape:
    """How a block's warps share groups of 16 rows, and how far its ring reaches ahead."""

    warps: int
    """That multiply; one more streams."""
    steps: int
    """Tiles of a group that a warp takes at most; `piece` divides them."""
    piece: int
    """Of them, tiles of a warp in a stage of the ring."""
    held: bool
    """Whether a warp has its x in registers, else in shared memory."""
    stages: int
    """Of a block with more than FEW_PIECES to stream."""
    few_stages: int
    """Of a block with less: the block after it then fits beside it, and streams before it has ended."""
    spread: int = 1
    """Blocks per multiprocessor."""

    @property
    def piece_tiles(self) -> int:
        """Of a stage."""
        return self.warps * self.piece

    @property
    def most_k(self) -> int:
        return 64 * self.warps * self.steps


FEW_PIECES = 6
_SHORT = StreamShape(8, 4, 4, True, 9, 5)
_SHORT_PAIRS = StreamShape(4, 8, 4, True, 8, 8)
_MIDDLE = StreamShape(8, 8, 4, True, 9, 5)
_LONG = StreamShape(8, 12, 4, True, 9, 5)
_LONGEST = StreamShape(8, 28, 2, False, 6, 6, spread=2)
SHAPES = {
    Finish.STORE: (_SHORT, _MIDDLE, _LONG, _LONGEST),
    Finish.ADD: (_SHORT, _MIDDLE, _LONG, _LONGEST),
    Finish.SWIGLU: (_SHORT_PAIRS, _MIDDLE, _LONG, _LONGEST),
}
"""The first whose most_k suffices. On an H200: 128256 × 4096 takes 68 µs, as a copy of its bytes does (117 in
skinny.cu); 28672 × 4096 with SwiGLU 16.7 (26.9), 4096 × 14336 9.2 (16.5), 2048 × 2048 1.9 (2.6)."""


@dataclass(frozen=True, slots=True)
class StreamVariant:
    """A kernel."""

    out: DType
    finish: Finish
    norm: bool
    shape: StreamShape

    @property
    def expression(self) -> str:
        shape = self.shape
        norm, held = str(self.norm).lower(), str(shape.held).lower()
        numbers = f"{shape.warps}, {shape.steps}, {shape.piece}, {held}"
        return f"skinny_stream<{_C_TYPES[self.out]}, {self.finish.value}, {norm}, {numbers}>"

    @property
    def groups(self) -> int:
        """Groups of 16 rows of the weight that make 16 elements of y."""
        return 2 if self.finish is Finish.SWIGLU else 1

    def split(self, limits: DeviceLimits, n: int, k: int) -> StreamSplit:
        """How a launch divides the work."""
        shape, units = self.shape, n // TILE_ROWS
        blocks = min(units, shape.spread * limits.multiprocessors)
        most = -(-units // blocks)
        pieces = most * self.groups * -(-tile_columns(k) // shape.piece_tiles)
        stages = min(pieces, shape.stages if pieces > FEW_PIECES else shape.few_stages)
        return StreamSplit(blocks, units // blocks, units % blocks, stages, min(most, MOST_BATCH))

    def shared_bytes(self, split: StreamSplit) -> int:
        """Of a block: the ring and its barriers, x, two batches' sums, the squares."""
        shape = self.shape
        tiles = 4 if shape.held else -(-shape.steps // 4) * 4
        size = split.stages * (shape.piece_tiles * _TILE_BYTES + 16) + shape.warps * tiles * _DIGIT_BYTES
        return size + 2 * split.batch * (self.groups * shape.warps + 1) * TILE_ROWS * 4 + shape.warps * 4


@dataclass(frozen=True, slots=True)
class StreamSplit:
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


_FINISHES = (
    (DType.BF16, Finish.STORE, True),
    (DType.BF16, Finish.STORE, False),
    (DType.F32, Finish.STORE, False),
    (DType.BF16, Finish.ADD, False),
    (DType.BF16, Finish.SWIGLU, True),
    (DType.BF16, Finish.SWIGLU, False),
)
VARIANTS = tuple(
    StreamVariant(out, finish, norm, shape) for out, finish, norm in _FINISHES for shape in SHAPES[finish]
)
UNITS = tuple(CompileUnit(SOURCE, (variant.expression,)) for variant in VARIANTS)


def pick_stream(
    limits: DeviceLimits, n: int, k: int, out: DType, finish: Finish, norm: bool
) -> StreamVariant | None:
    """The kernel for one row times a q4_0 weight of this shape; None where there is none."""
    if limits.arch != ARCH:
        return None
    for variant in VARIANTS:
        same = (variant.out, variant.finish, variant.norm) == (out, finish, norm)
        if same and k <= variant.shape.most_k:
            fits = variant.shared_bytes(variant.split(limits, n, k)) <= limits.shared_bytes_per_block
            return variant if fits else None
    return None


def skinny_stream(
    library: KernelLibrary,
    limits: DeviceLimits,
    variant: StreamVariant,
    *,
    x: Tensor,
    weight: Q4Tiles,
    y: Tensor,
    norm: FusedNorm | None = None,
) -> Launch:
    """y = x · weightᵀ, or what the variant's `finish` makes of it.

    x       bf16 [1, k], k ≤ most_k; normalised first if the variant has a norm
    weight  [n, k], with SWIGLU [2 · n, k], gates first
    y       [1, n] of the variant's type

    Raises ValueError for a variant that the device has too little shared memory for.
    """
    n, k = y.shape[1], x.shape[1]
    split = variant.split(limits, n, k)
    shared_bytes = variant.shared_bytes(split)
    limits.expect_shared(variant.expression, shared_bytes)
    kernel = library.kernel(SOURCE, variant.expression, dynamic_shared_bytes=shared_bytes)
    gains, epsilon, offset = (norm.gains, norm.epsilon, norm.offset) if norm else (None, 0.0, 0.0)
    buffers = (x, weight.quants, weight.scales, gains, y)
    numbers = (n, k, split.each, split.extra, split.stages, split.batch)
    arguments = (*buffers, *map(i32, numbers), f32(epsilon), f32(offset))
    grid, block = Dim3(split.blocks), Dim3(variant.shape.warps * 32 + 32)
    return Launch(kernel, grid, block, arguments, shared_bytes=shared_bytes)
