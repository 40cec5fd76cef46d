"""Matrix products of at most 8 rows, fused with the norm before and what follows: a residual add, or SwiGLU
(skinny.cu).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kernels.compiler import CompileUnit
from kernels.device import DeviceLimits
from kernels.launch import Dim3, KernelLibrary, Launch, f32, i32
from kernels.tensor import DType, Tensor, expect

SOURCE = "skinny.cu"
MAX_ROWS = 8
MAX_FUSED_NORM_ROWS = 1
"""With 8 rows every block reads a residual stream that has just been written: a decode step of the Qwen3-1.7B
shape took 1,892 µs against 1,511 with norms of their own on an H200; with one row 1,297 against 1,361."""
_TILE_ROWS = 16
_STEP = 32
_C_TYPES = {DType.F32: "float", DType.BF16: "bf16"}


class Finish(IntEnum):
    """What becomes of the float32 sums."""

    STORE = 0
    ADD = 1
    """Added to what stands in y."""
    SWIGLU = 2
    """The weights are gate over up; y = silu(gate) · up."""


MAX_WEIGHT_BYTES = {Finish.STORE: 32 << 20, Finish.ADD: 32 << 20, Finish.SWIGLU: 64 << 20}
"""Beyond, cuBLASLt streams the weights as fast or faster on an H200: 201 MB in 47.3 µs against 52.1."""


@dataclass(frozen=True, slots=True)
class SkinnyVariant:
    """How a tile's k is spread. Microseconds are an H200's, for 1 and 8 rows."""

    out: DType
    finish: Finish
    norm: bool
    warps: int
    """Of a block."""
    depth: int
    """Pieces of 16 bytes, times two rows, that a lane has on their way at once."""
    resident: int
    """Blocks that a multiprocessor holds at once, so that the next kernel's fetch their weights early."""
    one_row: bool
    """For x of one row, or for more."""
    few_blocks: bool | None = None
    """True: for grids of at most a block per multiprocessor; False: for larger ones; None: for all."""

    @property
    def expression(self) -> str:
        shape = f"{self.finish.value}, {str(self.norm).lower()}, {self.warps}, {self.depth}, {self.resident}"
        return f"skinny_product<{_C_TYPES[self.out]}, {shape}>"


VARIANTS = (
    SkinnyVariant(DType.BF16, Finish.STORE, True, 16, 2, 2, True),
    SkinnyVariant(DType.BF16, Finish.STORE, False, 16, 2, 2, True),
    SkinnyVariant(DType.BF16, Finish.STORE, False, 8, 8, 2, False),
    SkinnyVariant(DType.F32, Finish.ADD, False, 16, 4, 1, True, few_blocks=True),
    SkinnyVariant(DType.F32, Finish.ADD, False, 8, 6, 2, True, few_blocks=False),
    SkinnyVariant(DType.F32, Finish.ADD, False, 8, 8, 2, False),
    SkinnyVariant(DType.BF16, Finish.ADD, False, 16, 4, 1, True, few_blocks=True),
    SkinnyVariant(DType.BF16, Finish.ADD, False, 8, 6, 2, True, few_blocks=False),
    SkinnyVariant(DType.BF16, Finish.ADD, False, 8, 8, 2, False),
    SkinnyVariant(DType.BF16, Finish.SWIGLU, True, 8, 2, 3, True),
    SkinnyVariant(DType.BF16, Finish.SWIGLU, False, 8, 2, 3, True),
    SkinnyVariant(DType.BF16, Finish.SWIGLU, False, 8, 4, 2, False),
)
"""Shallow pipelines with more blocks win where x is small; with 8 rows x must be on its way early too."""

_SPILLS_A_LITTLE = frozenset({VARIANTS[9].expression})
"""12 bytes, for a third block on each multiprocessor."""

UNITS = (CompileUnit(SOURCE, tuple(variant.expression for variant in VARIANTS), (), _SPILLS_A_LITTLE),)


@dataclass(frozen=True, slots=True)
class FusedNorm:
    """RMSNorm of x: x / rms(x) · (offset + gains)."""

    gains: Tensor
    """bf16 [k]."""
    epsilon: float
    offset: float = 0.0


def fits(rows: int, n: int, k: int, finish: Finish = Finish.STORE) -> bool:
    """Whether there is a kernel for this shape, and whether it is the faster way."""
    weight_bytes = 2 * n * k * (2 if finish is Finish.SWIGLU else 1)
    return _has_kernel(rows, n, k) and weight_bytes <= MAX_WEIGHT_BYTES[finish]


def pick_variant(
    limits: DeviceLimits, rows: int, n: int, out: DType, finish: Finish, norm: bool
) -> SkinnyVariant:
    """Raises ValueError if there is none."""
    few_blocks = n // _TILE_ROWS <= limits.multiprocessors
    for variant in VARIANTS:
        same = (variant.out, variant.finish, variant.norm) == (out, finish, norm)
        if same and variant.one_row == (rows == 1) and variant.few_blocks in (None, few_blocks):
            return variant
    after = " after a norm" if norm else ""
    raise ValueError(f"{SOURCE}: no kernel for {rows} rows, {finish.name} into {out.value}{after}")


def skinny_product(
    library: KernelLibrary,
    limits: DeviceLimits,
    *,
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    finish: Finish = Finish.STORE,
    norm: FusedNorm | None = None,
) -> Launch:
    """y = x · weightᵀ, or what `finish` makes of it.

    x       bf16 [rows ≤ 8, k], k a multiple of 32; one row may be normalised first: `norm`
    weight  bf16 [n, k], n a multiple of 16; with SWIGLU [2 · n, k], gates first
    y       bf16 [rows, n]; with ADD also float32

    Raises ValueError for shapes that do not fit.
    """
    rows, n = y.shape
    k = x.shape[1]
    if not _has_kernel(rows, n, k):
        raise ValueError(
            f"{SOURCE}: no kernel for {rows} × {n} × {k}: at most {MAX_ROWS} rows, "
            f"n a multiple of {_TILE_ROWS}, k of {_STEP}"
        )
    expect(SOURCE, "x", x, DType.BF16, (rows, k))
    expect(SOURCE, "weight", weight, DType.BF16, (2 * n if finish is Finish.SWIGLU else n, k))
    expect(SOURCE, "y", y, y.dtype, (rows, n))
    if norm is not None:
        expect(SOURCE, "norm.gains", norm.gains, DType.BF16, (k,))
    variant = pick_variant(limits, rows, n, y.dtype, finish, norm is not None)
    kernel = library.kernel(SOURCE, variant.expression)
    gains, epsilon, offset = (norm.gains, norm.epsilon, norm.offset) if norm else (None, 0.0, 0.0)
    arguments = (x, weight, gains, y, i32(rows), i32(n), i32(k), f32(epsilon), f32(offset))
    return Launch(kernel, Dim3(n // _TILE_ROWS), Dim3(variant.warps * 32), arguments)


def _has_kernel(rows: int, n: int, k: int) -> bool:
    return rows <= MAX_ROWS and n % _TILE_ROWS == 0 and k % _STEP == 0
