"""FP8 on the device: e4m3 with a float32 scale per row, and the kernel that makes it of bf16 (fp8.cu)."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.compiler import CompileUnit
from kernels.launch import Dim3, KernelLibrary, Launch, i32
from kernels.tensor import DType, Tensor, expect

SOURCE = "fp8.cu"
MIN_COMPUTE_CAPABILITY = (8, 9)
"""The first whose tensor cores multiply e4m3."""
_VECTOR = 8
_MOST_THREADS = 1024
_CHUNKS = (1, 2, 4)
"""Vectors of 8 elements that each thread holds: the least that a row needs."""
MAX_COLUMNS = _VECTOR * _MOST_THREADS * _CHUNKS[-1]


def _expression(chunks: int) -> str:
    return f"quantise_rows<{chunks}>"


UNITS = (CompileUnit(SOURCE, tuple(_expression(chunks) for chunks in _CHUNKS)),)


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """A matrix [n, k]; value = scale[row] · e4m3."""

    values: Tensor
    """e4m3 [n, k]."""
    scale: Tensor
    """float32 [n]."""

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        n, k = self.values.shape
        return n, k

    def rows(self, start: int, stop: int) -> Fp8Rows:
        """Rows start … stop − 1. Raises ValueError beyond the matrix."""
        return Fp8Rows(self.values.rows(start, stop), self.scale.rows(start, stop))


def quantise_rows(library: KernelLibrary, *, x: Tensor, out: Fp8Rows) -> Launch:
    """Each row's scale = largest magnitude / 448 (1 for zeros), values = x / scale, rounded to the nearest.

    x    bf16 [rows, k]; k a multiple of 8, at most 32768
    out  of the same shape; its scale need not be aligned, so that rows of a larger matrix can be filled

    Raises ValueError for shapes that do not fit.
    """
    rows, k = out.shape
    expect(SOURCE, "x", x, DType.BF16, (rows, k))
    expect_fp8(SOURCE, "out", out, (rows, k))
    if k % _VECTOR or k > MAX_COLUMNS:
        raise ValueError(f"{SOURCE}: k {k} must be a multiple of {_VECTOR} and at most {MAX_COLUMNS}")
    chunks = next(c for c in _CHUNKS if k <= _VECTOR * _MOST_THREADS * c)
    threads = -(-k // (_VECTOR * chunks * 32)) * 32
    arguments = (x, out.values, out.scale, i32(k))
    return Launch(library.kernel(SOURCE, _expression(chunks)), Dim3(rows), Dim3(threads), arguments)


def expect_fp8(kernel: str, name: str, rows: Fp8Rows, shape: tuple[int | None, int | None]) -> None:
    """Raises ValueError unless values are e4m3 of this shape and scale float32, one a row."""
    expect(kernel, f"{name}.values", rows.values, DType.E4M3, shape)
    if rows.scale.shape != rows.values.shape[:1] or rows.scale.dtype is not DType.F32:
        raise ValueError(
            f"{kernel}: {name}.scale must be f32 [{rows.values.shape[0]}], "
            f"got {rows.scale.dtype.value} {list(rows.scale.shape)}"
        )
