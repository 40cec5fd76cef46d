"""Matrix products of at most 8 rows, fused with what follows: a residual add, or SwiGLU (skinny.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kernels.compiler import CompileUnit
from kernels.launch import Dim3, KernelLibrary, Launch, i32
from kernels.tensor import DType, Tensor, expect

SOURCE = "skinny.cu"
MAX_ROWS = 8
_TILE_ROWS = 16
_STEP = 32
_THREADS = 256
_C_TYPES = {DType.F32: "float", DType.BF16: "bf16"}


class Finish(IntEnum):
    """What becomes of the float32 sums."""

    STORE = 0
    ADD = 1
    """Added to what stands in y."""
    SWIGLU = 2
    """The weights are gate over up; y = silu(gate) · up."""


@dataclass(frozen=True, slots=True)
class SkinnyVariant:
    """How many pieces of 16 bytes, times two rows, a lane has on their way at once."""

    out: DType
    finish: Finish
    depth: int
    when: str

    @property
    def expression(self) -> str:
        return f"skinny_product<{_C_TYPES[self.out]}, {self.finish.value}, {self.depth}>"


VARIANTS = (
    SkinnyVariant(DType.BF16, Finish.STORE, 8, "always"),
    SkinnyVariant(DType.F32, Finish.ADD, 8, "a float32 residual stream"),
    SkinnyVariant(DType.BF16, Finish.ADD, 8, "a bf16 residual stream"),
    SkinnyVariant(DType.BF16, Finish.SWIGLU, 4, "two tiles a block: half the depth for as many bytes"),
)

UNITS = (CompileUnit(SOURCE, tuple(variant.expression for variant in VARIANTS)),)


def fits(rows: int, n: int, k: int) -> bool:
    """Whether there is a kernel for this shape."""
    return rows <= MAX_ROWS and n % _TILE_ROWS == 0 and k % _STEP == 0


def skinny_product(
    library: KernelLibrary, *, x: Tensor, weight: Tensor, y: Tensor, finish: Finish = Finish.STORE
) -> Launch:
    """y = x · weightᵀ, or what `finish` makes of it.

    x       bf16 [rows ≤ 8, k], k a multiple of 32
    weight  bf16 [n, k], n a multiple of 16; with SWIGLU [2 · n, k], gates first
    y       bf16 [rows, n]; with ADD also float32

    Raises ValueError for shapes that do not fit.
    """
    rows, n = y.shape
    k = x.shape[1]
    if not fits(rows, n, k):
        raise ValueError(
            f"{SOURCE}: no kernel for {rows} × {n} × {k}: at most {MAX_ROWS} rows, n a multiple of {_TILE_ROWS}, "
            f"k of {_STEP}"
        )
    expect(SOURCE, "x", x, DType.BF16, (rows, k))
    expect(SOURCE, "weight", weight, DType.BF16, (2 * n if finish is Finish.SWIGLU else n, k))
    expect(SOURCE, "y", y, y.dtype, (rows, n))
    variant = next((v for v in VARIANTS if (v.out, v.finish) == (y.dtype, finish)), None)
    if variant is None:
        raise ValueError(f"{SOURCE}: no kernel for {finish.name} into {y.dtype.value}")
    kernel = library.kernel(SOURCE, variant.expression)
    return Launch(kernel, Dim3(n // _TILE_ROWS), Dim3(_THREADS), (x, weight, y, i32(rows), i32(n), i32(k)))
