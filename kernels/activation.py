"""SwiGLU and GeGLU from the merged gate|up product, as bf16 or quantised by rows (activation.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernels.compiler import CompileUnit
from kernels.device import DeviceLimits
from kernels.fp8 import Fp8Rows, expect_fp8
from kernels.launch import Dim3, KernelLibrary, Launch, i32
from kernels.tensor import DType, Tensor, expect

SOURCE = "activation.cu"
_KINDS = {"silu": "false", "gelu_tanh": "true"}
_VECTOR = 8
_MOST_THREADS = 256
_FIRST_WITH_CLUSTERS = (9, 0)


@dataclass(frozen=True, slots=True)
class Fp8Variant:
    """How a row that is quantised is spread over threads."""

    cluster: int
    """Blocks that share a row."""
    chunks: int
    """Vectors of 8 elements that each thread holds."""
    early: bool
    """Whether weight scales are fetched before the wait for earlier kernels, and held in registers."""
    threads: int
    """Most threads of a block."""
    resident: int
    """Blocks that a multiprocessor holds at once."""
    max_rows: int | None = None
    """Rows per multiprocessor up to which it is the fastest; None: any number."""

    @property
    def max_inter(self) -> int:
        return self.cluster * self.chunks * self.threads * _VECTOR

    def expression(self, kind: str, scaled: bool) -> str:
        early = str(self.early).lower()
        shape = f"{self.cluster}, {self.chunks}, {early}, {self.threads}, {self.resident}"
        return f"gated_activation_fp8<{kind}, {str(scaled).lower()}, {shape}>"


FP8_VARIANTS = (
    Fp8Variant(1, 1, True, 1024, 1, max_rows=2),
    Fp8Variant(2, 1, True, 1024, 1, max_rows=1),
    Fp8Variant(1, 2, False, 768, 2, max_rows=8),
    Fp8Variant(1, 4, False, 384, 3),
    Fp8Variant(1, 4, False, 512, 2),
    Fp8Variant(1, 4, False, 1024, 1),
)
"""The first that holds a row is taken. On an H200 64 rows of 6,144 take 2.3 µs with a thread for 8 elements,
3.0 with one for 16; 64 of 12,288 take 3.4 with two blocks a row, 3.8 with four and 4.0 with one; 8,192 of
12,288 take 135 with three small blocks on a multiprocessor, 146 with two large ones, 212 in clusters."""


def _expression(kind: str, scaled: bool) -> str:
    return f"gated_activation<{kind}, {str(scaled).lower()}>"


_SPILLS_A_LITTLE = frozenset({FP8_VARIANTS[2].expression(_KINDS["gelu_tanh"], True)})
"""28 bytes on sm_100a, for tanh in 40 registers; none elsewhere."""

UNITS = (
    CompileUnit(
        SOURCE,
        tuple(_expression(kind, scaled) for kind in _KINDS.values() for scaled in (False, True))
        + tuple(v.expression(kind, True) for kind in _KINDS.values() for v in FP8_VARIANTS),
        may_spill=_SPILLS_A_LITTLE,
    ),
)


def gated_activation(
    library: KernelLibrary,
    *,
    gate_up: Tensor,
    out: Tensor,
    activation: Literal["silu", "gelu_tanh"] = "silu",
    weight_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> Launch:
    """out = activation(gate) · up.

    gate_up       bf16 [rows, 2 · inter], gate first; inter a multiple of 8
    out           bf16 [rows, inter]
    weight_scale  float32 [2 · inter] and row_scale, float32 [rows]: of an FP8 product's raw sums, which they
                  multiply first

    Raises ValueError for shapes that do not fit.
    """
    rows, inter = out.shape
    expect(SOURCE, "out", out, DType.BF16, (rows, inter))
    _expect_gate_up(gate_up, weight_scale, row_scale, rows, inter)
    vectors = inter // _VECTOR
    threads = min(_MOST_THREADS, -(-vectors // 32) * 32)
    kernel = library.kernel(SOURCE, _expression(_KINDS[activation], weight_scale is not None))
    arguments = (gate_up, weight_scale, row_scale, out, i32(inter))
    return Launch(kernel, Dim3(-(-vectors // threads), rows), Dim3(threads), arguments)


def gated_activation_fp8(
    library: KernelLibrary,
    limits: DeviceLimits,
    *,
    gate_up: Tensor,
    weight_scale: Tensor,
    row_scale: Tensor,
    out: Fp8Rows,
    activation: Literal["silu", "gelu_tanh"] = "silu",
) -> Launch:
    """out = activation(gate) · up, quantised by rows: scale = largest magnitude / 448.

    gate_up       bf16 [rows, 2 · inter], gate first: an FP8 product's raw sums; inter a multiple of 8, at
                  most 32768
    weight_scale  float32 [2 · inter] and row_scale, float32 [rows]: what the raw sums are multiplied by
    out           [rows, inter]

    Raises ValueError for shapes that do not fit.
    """
    rows, inter = out.shape
    expect_fp8(SOURCE, "out", out, (rows, inter))
    _expect_gate_up(gate_up, weight_scale, row_scale, rows, inter)
    variant = pick_variant(limits, rows, inter)
    per_block = _VECTOR * variant.chunks * variant.cluster
    threads = -(-inter // (per_block * 32)) * 32
    kernel = library.kernel(SOURCE, variant.expression(_KINDS[activation], True))
    arguments = (gate_up, weight_scale, row_scale, out.values, out.scale, i32(inter))
    grid = Dim3(rows * variant.cluster)
    return Launch(kernel, grid, Dim3(threads), arguments, cluster=variant.cluster)


def pick_variant(limits: DeviceLimits, rows: int, inter: int) -> Fp8Variant:
    """Raises ValueError if a row is too long for all."""
    for variant in FP8_VARIANTS:
        has_clusters = variant.cluster == 1 or limits.compute_capability >= _FIRST_WITH_CLUSTERS
        few = variant.max_rows is None or rows <= variant.max_rows * limits.multiprocessors
        if has_clusters and few and inter <= variant.max_inter:
            return variant
    raise ValueError(f"{SOURCE}: inter {inter} must be at most {FP8_VARIANTS[-1].max_inter} to be quantised")


def _expect_gate_up(
    gate_up: Tensor, weight_scale: Tensor | None, row_scale: Tensor | None, rows: int, inter: int
) -> None:
    expect(SOURCE, "gate_up", gate_up, DType.BF16, (rows, 2 * inter))
    if inter % _VECTOR:
        raise ValueError(f"{SOURCE}: inter {inter} must be a multiple of {_VECTOR}")
    if (weight_scale is None) != (row_scale is None):
        raise ValueError(f"{SOURCE}: weight_scale and row_scale belong together")
    if weight_scale is not None and row_scale is not None:
        expect(SOURCE, "weight_scale", weight_scale, DType.F32, (2 * inter,))
        expect(SOURCE, "row_scale", row_scale, DType.F32, (rows,))
