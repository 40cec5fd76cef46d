"""RMSNorm over rows, fused with the residual add before it and with row quantisation (norm.cu)."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.compiler import CompileUnit
from kernels.launch import Dim3, KernelLibrary, Launch, f32, i32
from kernels.tensor import DType, Tensor, expect

SOURCE = "norm.cu"
_VECTOR = 8


@dataclass(frozen=True, slots=True)
class NormVariant:
    """How a row is spread over a block."""

    chunks: int
    """Vectors of 8 elements that each thread holds."""
    max_hidden: int
    when: str


VARIANTS = (
    NormVariant(1, 8192, "hidden up to 8192: the most threads, so the least latency"),
    NormVariant(2, 16384, "larger rows"),
)


def _expression(quantise: bool, scaled: bool, chunks: int) -> str:
    return f"add_rms_norm<{str(quantise).lower()}, {str(scaled).lower()}, {chunks}>"


UNITS = (
    CompileUnit(
        SOURCE,
        tuple(
            _expression(quantise, scaled, variant.chunks)
            for quantise in (False, True)
            for scaled in (False, True)
            for variant in VARIANTS
        ),
    ),
)


def add_rms_norm(
    library: KernelLibrary,
    *,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    epsilon: float,
    delta: Tensor | None = None,
    delta_weight_scale: Tensor | None = None,
    delta_row_scale: Tensor | None = None,
    scale: Tensor | None = None,
    row_index: Tensor | None = None,
    weight_offset: float = 0.0,
) -> Launch:
    """residual += delta (if given); out = residual / rms(residual) · (weight_offset + weight).

    residual   bf16 [rows, hidden], updated in place
    delta      bf16 [rows, hidden]; of an FP8 product's raw sums also delta_weight_scale, float32 [hidden],
               and delta_row_scale, float32 [rows]: added is the product of the three
    weight     bf16 [hidden]; hidden a multiple of 8, at most 16384
    out        bf16 [out rows, hidden], or e4m3 with `scale` float32 [out rows]: largest magnitude / 448
    row_index  int32 [out rows]: row r takes row row_index[r] of residual and delta; residual stays

    Raises ValueError for shapes that do not fit.
    """
    rows, hidden = out.shape
    quantise = out.dtype is DType.E4M3
    expect(SOURCE, "residual", residual, DType.BF16, (None if row_index else rows, hidden))
    expect(SOURCE, "weight", weight, DType.BF16, (hidden,))
    if out.dtype not in (DType.BF16, DType.E4M3):
        raise ValueError(f"{SOURCE}: no kernel into {out.dtype.value}")
    _expect_delta(delta, delta_weight_scale, delta_row_scale, residual.shape)
    if quantise != (scale is not None):
        raise ValueError(f"{SOURCE}: scale belongs to an e4m3 result")
    if scale is not None:
        expect(SOURCE, "scale", scale, DType.F32, (rows,))
    if row_index is not None:
        expect(SOURCE, "row_index", row_index, DType.I32, (rows,))
    if hidden % _VECTOR or hidden > VARIANTS[-1].max_hidden:
        raise ValueError(
            f"{SOURCE}: hidden {hidden} must be a multiple of 8 and at most {VARIANTS[-1].max_hidden}"
        )
    variant = next(v for v in VARIANTS if hidden <= v.max_hidden)
    per_thread = _VECTOR * variant.chunks
    threads = -(-hidden // (per_thread * 32)) * 32
    kernel = library.kernel(SOURCE, _expression(quantise, delta_row_scale is not None, variant.chunks))
    arguments = (
        residual,
        delta,
        delta_weight_scale,
        delta_row_scale,
        weight,
        row_index,
        out,
        scale,
        i32(hidden),
        f32(epsilon),
        f32(weight_offset),
    )
    return Launch(kernel, Dim3(rows), Dim3(threads), arguments)


def _expect_delta(
    delta: Tensor | None, weight_scale: Tensor | None, row_scale: Tensor | None, shape: tuple[int, ...]
) -> None:
    """shape: the residual's."""
    if delta is not None:
        expect(SOURCE, "delta", delta, DType.BF16, shape)
    if (weight_scale is None) != (row_scale is None) or (row_scale is not None and delta is None):
        raise ValueError(f"{SOURCE}: delta, delta_weight_scale and delta_row_scale belong together")
    if weight_scale is not None and row_scale is not None:
        expect(SOURCE, "delta_weight_scale", weight_scale, DType.F32, shape[1:])
        expect(SOURCE, "delta_row_scale", row_scale, DType.F32, shape[:1])
