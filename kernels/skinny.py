"""Matrix products of at most 8 rows with weights in bf16, FP8 or q4_0, fused with the norm before and what
follows: a residual add, or SwiGLU (skinny.cu; on Hopper one row of q4_0: skinny_stream.cu, more rows of bf16:
skinny_rows.cu).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kernels.compiler import CompileUnit
from kernels.device import DeviceLimits
from kernels.fp8 import Fp8Rows
from kernels.fused import Finish as Finish
from kernels.fused import FusedNorm as FusedNorm
from kernels.launch import Dim3, KernelLibrary, Launch, f32, i32
from kernels.q4 import Q4Tiles, tile_shapes
from kernels.skinny_rows import pick_rows, skinny_rows
from kernels.skinny_stream import pick_stream, skinny_stream
from kernels.tensor import DType, Tensor, expect

SOURCE = "skinny.cu"
MAX_ROWS = 8
MAX_FUSED_NORM_ROWS = 1
"""With 8 rows every block reads a residual stream that has just been written: a decode step of the Qwen3-1.7B
shape took 1,892 µs against 1,511 with norms of their own on an H200; with one row 1,297 against 1,361."""
_TILE_ROWS = 16
_TILE_COLUMNS = 64
_STEP = 32
_C_TYPES = {DType.F32: "float", DType.BF16: "bf16"}
Weight = Tensor | Fp8Rows | Q4Tiles


class WeightKind(StrEnum):
    """How a weight is stored."""

    BF16 = "bf16"
    FP8 = "fp8"
    """e4m3 with a float32 scale per row."""
    Q4 = "q4"
    """q4_0 in tiles."""

    @property
    def decoder(self) -> str:
        """Its class in weights.cuh."""
        return f"{self.value.capitalize()}Weights"

    @property
    def bits(self) -> float:
        """Of an element, scales counted."""
        return {WeightKind.BF16: 16.0, WeightKind.FP8: 8.0, WeightKind.Q4: 4.5}[self]

    @property
    def lane_bytes(self) -> int:
        """What a lane keeps of a tile in shared memory."""
        return {WeightKind.BF16: 64, WeightKind.FP8: 32, WeightKind.Q4: 24}[self]

    @property
    def max_rows(self) -> int:
        """Most rows of x."""
        return 1 if self is WeightKind.FP8 else MAX_ROWS

    @property
    def row_pad(self) -> int:
        """Elements between staged rows of x."""
        return 8 if self is WeightKind.FP8 else 32


MAX_WEIGHT_BYTES = {Finish.STORE: 32 << 20, Finish.ADD: 32 << 20, Finish.SWIGLU: 64 << 20}
"""Of bf16 weights: beyond, cuBLASLt streams them as fast or faster on an H200 (201 MB: 47.3 µs, not 52.1)."""


@dataclass(frozen=True, slots=True)
class Ring:
    """How the warps of a block stream weights."""

    warps: int
    """Of a block."""
    share: int
    """Warps that share the k of 16 rows of the weight."""
    group: int
    """Tiles of 64 of k that a warp takes at once."""
    stages: int
    """Groups that a warp has on their way at once."""
    resident: int
    """Blocks that a multiprocessor has registers for."""
    spread: int | None = None
    """Blocks per multiprocessor, each of many tiles; None: as many blocks as there are tiles."""
    staged: bool = True
    """Whether a block brings x into shared memory; else each warp reads what it needs when it does."""


@dataclass(frozen=True, slots=True)
class SkinnyVariant:
    """A kernel and the shapes it is for."""

    kind: WeightKind
    out: DType
    finish: Finish
    norm: bool
    one_row: bool
    """For x of one row, or for more."""
    ring: Ring

    @property
    def expression(self) -> str:
        ring, rows = self.ring, 1 if self.one_row else MAX_ROWS
        flags = f"{str(self.norm).lower()}, {rows}, {str(ring.staged).lower()}"
        numbers = f"{ring.warps}, {ring.share}, {ring.group}, {ring.stages}, {ring.resident}"
        out = _C_TYPES[self.out]
        return f"skinny_product<{self.kind.decoder}, {out}, {self.finish.value}, {flags}, {numbers}>"

    def shared_bytes(self, rows: int, k: int) -> int:
        """Of a block: the ring, two tiles' sums, squares, and x if it is staged."""
        ring, tiles = self.ring, 2 if self.finish is Finish.SWIGLU else 1
        columns = 1 if self.one_row else MAX_ROWS
        size = ring.stages * ring.group * tiles * self.kind.lane_bytes * ring.warps * 32
        size += 2 * ring.warps * tiles * columns * _TILE_ROWS * 4 + 128
        if ring.staged:
            group = ring.group * _TILE_COLUMNS
            size += rows * (-(-k // group) * group + self.kind.row_pad) * 2
        return size

    def fits(self, limits: DeviceLimits, rows: int, k: int) -> bool:
        """Whether a multiprocessor has the shared memory."""
        return self.shared_bytes(rows, k) <= limits.shared_bytes_per_block

    def blocks(self, limits: DeviceLimits, n: int) -> int:
        """Of the grid."""
        tiles, spread = n // _TILE_ROWS, self.ring.spread
        return tiles if spread is None else min(tiles, spread * limits.multiprocessors)


_FLAVOURS = {
    Finish.STORE: ((DType.BF16, True), (DType.BF16, False), (DType.F32, False)),
    Finish.ADD: ((DType.BF16, False),),
    Finish.SWIGLU: ((DType.BF16, True), (DType.BF16, False)),
}
"""Results there are, and whether after a norm; that for one row only."""

_ANY = 1 << 62
_MB = 1_000_000
_ONE_ROW: dict[tuple[WeightKind, Finish], dict[int, Ring]] = {
    (WeightKind.Q4, Finish.STORE): {
        12 * _MB: Ring(16, 16, 2, 2, 2, spread=1),
        _ANY: Ring(16, 16, 2, 2, 2, spread=2),
    },
    (WeightKind.Q4, Finish.ADD): {
        12 * _MB: Ring(16, 16, 2, 2, 2, spread=1),
        _ANY: Ring(16, 16, 2, 2, 2, spread=2),
    },
    (WeightKind.Q4, Finish.SWIGLU): {
        24 * _MB: Ring(16, 16, 1, 2, 2, spread=1),
        _ANY: Ring(16, 16, 1, 2, 2, spread=2),
    },
    (WeightKind.FP8, Finish.STORE): {
        12 * _MB: Ring(16, 16, 2, 3, 1, spread=1),
        _ANY: Ring(16, 16, 1, 2, 2),
    },
    (WeightKind.FP8, Finish.ADD): {
        16 * _MB: Ring(16, 16, 2, 2, 2, spread=1),
        _ANY: Ring(16, 16, 1, 2, 2, spread=2),
    },
    (WeightKind.FP8, Finish.SWIGLU): {
        32 * _MB: Ring(8, 8, 1, 6, 2, spread=1),
        _ANY: Ring(16, 16, 1, 6, 1, spread=1),
    },
    (WeightKind.BF16, Finish.STORE): {_ANY: Ring(8, 8, 1, 4, 2, spread=2)},
    (WeightKind.BF16, Finish.ADD): {
        12 * _MB: Ring(8, 8, 1, 4, 2, spread=1),
        _ANY: Ring(16, 16, 1, 4, 1, spread=1),
    },
    (WeightKind.BF16, Finish.SWIGLU): {_ANY: Ring(16, 16, 1, 3, 1, spread=1)},
}
_SOME_ROWS: dict[tuple[WeightKind, Finish], dict[int, Ring]] = {
    (WeightKind.Q4, Finish.STORE): {
        8 * _MB: Ring(16, 16, 1, 2, 2, spread=2, staged=False),
        24 * _MB: Ring(8, 8, 1, 2, 4, spread=3, staged=False),
        _ANY: Ring(16, 16, 1, 2, 2, spread=2),
    },
    (WeightKind.Q4, Finish.ADD): {
        8 * _MB: Ring(16, 16, 1, 4, 2, spread=1, staged=False),
        _ANY: Ring(16, 16, 1, 4, 2, spread=2, staged=False),
    },
    (WeightKind.Q4, Finish.SWIGLU): {_ANY: Ring(8, 8, 1, 4, 3, spread=3, staged=False)},
    (WeightKind.BF16, Finish.STORE): {_ANY: Ring(16, 16, 1, 1, 2, spread=2, staged=False)},
    (WeightKind.BF16, Finish.ADD): {_ANY: Ring(16, 16, 1, 4, 1, spread=1, staged=False)},
    (WeightKind.BF16, Finish.SWIGLU): {_ANY: Ring(8, 8, 1, 4, 2, spread=1, staged=False)},
}
"""By weights of up to so many bytes. Of FP8 only one row: more go to cuBLASLt in e4m3, which on an H200 takes
35 µs for a layer's four products of the Qwen3-1.7B shape with 64 rows and 68 of the 8B shape, quantising
included; 8 rows took 32 and 77 here."""


def _rings(kind: WeightKind, finish: Finish, one_row: bool) -> dict[int, Ring]:
    """With one for devices of little shared memory behind the rest."""
    table = (_ONE_ROW if one_row else _SOME_ROWS)[kind, finish]
    return {**table, _ANY + 1: Ring(8, 8, 1, 2, 2, staged=one_row)}


VARIANTS = tuple(
    SkinnyVariant(kind, out, finish, norm, one_row, ring)
    for kind, finish in _ONE_ROW
    for out, norm in _FLAVOURS[finish]
    for one_row in ((True,) if norm or kind.max_rows == 1 else (True, False))
    for ring in _rings(kind, finish, one_row).values()
)
UNITS = tuple(
    CompileUnit(SOURCE, (expression,))
    for expression in dict.fromkeys(variant.expression for variant in VARIANTS)
)


def kind_of(weight: Weight) -> WeightKind:
    """How a weight is stored."""
    if isinstance(weight, Q4Tiles):
        return WeightKind.Q4
    return WeightKind.FP8 if isinstance(weight, Fp8Rows) else WeightKind.BF16


def fits(
    rows: int, n: int, k: int, finish: Finish = Finish.STORE, kind: WeightKind = WeightKind.BF16
) -> bool:
    """Whether there is a kernel for this shape, and whether it is the faster way."""
    weight_bytes = 2 * n * k * (2 if finish is Finish.SWIGLU else 1)
    return _has_kernel(rows, n, k, kind) and (
        kind is not WeightKind.BF16 or weight_bytes <= MAX_WEIGHT_BYTES[finish]
    )


def pick_variant(
    limits: DeviceLimits,
    rows: int,
    n: int,
    k: int,
    out: DType,
    finish: Finish,
    norm: bool,
    kind: WeightKind = WeightKind.BF16,
) -> SkinnyVariant:
    """n, k: of the weight, gates and ups counted. Raises ValueError if there is none."""
    one_row = rows == 1
    if (out, norm) in _FLAVOURS[finish] and rows <= (1 if norm else kind.max_rows):
        weight_bytes = n * k * kind.bits // 8
        for most_bytes, ring in _rings(kind, finish, one_row).items():
            variant = SkinnyVariant(kind, out, finish, norm, one_row, ring)
            if weight_bytes <= most_bytes and variant.fits(limits, rows, k):
                return variant
    after = " after a norm" if norm else ""
    raise ValueError(
        f"{SOURCE}: no kernel for {rows} rows of {k}, {finish.name} into {out.value}{after}, "
        f"in {limits.shared_bytes_per_block} B of shared memory"
    )


def skinny_product(
    library: KernelLibrary,
    limits: DeviceLimits,
    *,
    x: Tensor,
    weight: Weight,
    y: Tensor,
    finish: Finish = Finish.STORE,
    norm: FusedNorm | None = None,
    variant: SkinnyVariant | None = None,
) -> Launch:
    """y = x · weightᵀ, or what `finish` makes of it.

    x       bf16 [rows ≤ 8, k], k a multiple of 32; one row may be normalised first: `norm`
    weight  [n, k] in bf16, FP8 or q4_0, n a multiple of 16; with SWIGLU [2 · n, k], gates first
    y       bf16 [rows, n]; with STORE and no norm also float32
    variant one that is made for all this; None: the fastest

    Raises ValueError for shapes that do not fit.
    """
    rows, n = y.shape
    k = x.shape[1]
    kind = kind_of(weight)
    if not _has_kernel(rows, n, k, kind):
        raise ValueError(
            f"{SOURCE}: no kernel for {rows} × {n} × {k} in {kind}: at most {kind.max_rows} rows, "
            f"n a multiple of {_TILE_ROWS}, k of {_STEP}"
        )
    expect(SOURCE, "x", x, DType.BF16, (rows, k))
    height = 2 * n if finish is Finish.SWIGLU else n
    values, scales = _buffers(weight, height, k)
    expect(SOURCE, "y", y, y.dtype, (rows, n))
    if norm is not None:
        expect(SOURCE, "norm.gains", norm.gains, DType.BF16, (k,))
    if variant is None and rows == 1 and isinstance(weight, Q4Tiles):
        stream = pick_stream(limits, n, k, y.dtype, finish, norm is not None)
        if stream is not None:
            return skinny_stream(library, limits, stream, x=x, weight=weight, y=y, norm=norm)
    if variant is None and isinstance(weight, Tensor) and norm is None:
        streamed = pick_rows(limits, rows, n, k, y.dtype, finish)
        if streamed is not None:
            return skinny_rows(library, limits, streamed, x=x, weight=weight, y=y)
    if variant is None:
        variant = pick_variant(limits, rows, height, k, y.dtype, finish, norm is not None, kind)
    shared_bytes = variant.shared_bytes(rows, k)
    limits.expect_shared(variant.expression, shared_bytes)
    kernel = library.kernel(SOURCE, variant.expression, dynamic_shared_bytes=shared_bytes)
    gains, epsilon, offset = (norm.gains, norm.epsilon, norm.offset) if norm else (None, 0.0, 0.0)
    arguments = (x, values, scales, gains, y, i32(rows), i32(n), i32(k), f32(epsilon), f32(offset))
    grid, block = Dim3(variant.blocks(limits, n)), Dim3(variant.ring.warps * 32)
    return Launch(kernel, grid, block, arguments, shared_bytes=shared_bytes)


def _buffers(weight: Weight, n: int, k: int) -> tuple[Tensor, Tensor | None]:
    """A weight's values and scales. Raises ValueError unless it is [n, k]."""
    if isinstance(weight, Q4Tiles):
        shapes = tile_shapes(n, k)
        expect(SOURCE, "weight.quants", weight.quants, DType.U8, shapes["quants"][0])
        expect(SOURCE, "weight.scales", weight.scales, DType.F16, shapes["scales"][0])
        return weight.quants, weight.scales
    if isinstance(weight, Fp8Rows):
        expect(SOURCE, "weight.values", weight.values, DType.E4M3, (n, k))
        expect(SOURCE, "weight.scale", weight.scale, DType.F32, (n,))
        return weight.values, weight.scale
    expect(SOURCE, "weight", weight, DType.BF16, (n, k))
    return weight, None


def _has_kernel(rows: int, n: int, k: int, kind: WeightKind) -> bool:
    return rows <= kind.max_rows and n % _TILE_ROWS == 0 and k % _STEP == 0
