"""The matrix products of a program, with the norms before and the residual adds after them.

How a product is computed follows from its weight's type and the number of rows: see Arm. Knows no attention
and no layer's place.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engine.config import Activation, DenseSpec, NormSpec
from engine.cuda.buffers import Activations, part
from engine.cuda.gemm_key import Epilogue, GemmKey
from engine.cuda.parts import Call, Parts
from engine.cuda.weights import DenseWeights, LinearWeights, Weight
from kernels.activation import gated_activation
from kernels.fp8 import Fp8Rows
from kernels.norm import add_rms_norm
from kernels.q4 import Q4Tiles, q4_dequantise
from kernels.q4_gemm import fits as q4_fits
from kernels.q4_gemm import q4_gemm
from kernels.skinny import MAX_FUSED_NORM_ROWS, MAX_ROWS, Finish, FusedNorm, WeightKind, fits, skinny_product
from kernels.tensor import Tensor


class Arm(StrEnum):
    """A way to compute a product."""

    SKINNY = "skinny"
    """kernels/skinny.cu: few rows, weights of any type."""
    Q4_GEMM = "q4 gemm"
    """kernels/q4_gemm.cu: more rows of x and q4_0 weights, dequantised in registers."""
    DEQUANTISED = "dequantised"
    """q4_0 weights made bf16 in a scratch buffer, then as CUBLASLT: many rows."""
    CUBLASLT = "cublaslt"
    """bf16 weights, many rows."""
    FP8 = "fp8"
    """FP8 weights and rows of x, by cuBLASLt: more rows than SKINNY takes. See products_fp8.py."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of the residual stream."""

    weight: Tensor
    spec: NormSpec


@dataclass(frozen=True, slots=True)
class Sums:
    """What a product left: values · weight_scale[n] · row_scale[r], where there are scales."""

    values: Tensor
    """bf16 [rows, n]."""
    weight_scale: Tensor | None = None
    """float32 [n]."""
    row_scale: Tensor | None = None
    """float32 [rows]."""


def pick_arm(parts: Parts, rows: int, weight: Weight, finish: Finish = Finish.STORE) -> Arm:
    """For x of so many rows · weightᵀ; with SWIGLU the weight is gate over up."""
    n, k = weight.shape
    n //= 2 if finish is Finish.SWIGLU else 1
    if isinstance(weight, Q4Tiles):
        if rows <= MAX_ROWS:
            return Arm.SKINNY
        return Arm.Q4_GEMM if q4_fits(parts.limits, rows, n, k) else Arm.DEQUANTISED
    if isinstance(weight, Fp8Rows):
        return Arm.SKINNY if fits(rows, n, k, finish, WeightKind.FP8) else Arm.FP8
    return Arm.SKINNY if parts.skinny and fits(rows, n, k, finish) else Arm.CUBLASLT


def pick_head_arm(parts: Parts, rows: int, weight: Weight) -> Arm:
    """For the logits: as pick_arm, but for a copy of the head, which is not worth its memory."""
    arm = pick_arm(parts, rows, weight)
    return Arm.Q4_GEMM if arm is Arm.DEQUANTISED else arm


class Products:
    """Of a program's rows: appends to `calls` what it takes, in order."""

    def __init__(self, parts: Parts, activations: Activations, rows: int, calls: list[Call]) -> None:
        """activations: the buffers that these rows use; `residual` must hold the rows' stream when the
        first call runs.
        """
        self.calls = calls
        self.residual = activations.residual.rows(0, rows)
        self._parts = parts
        self.rows = rows
        self.activations = activations
        self._normed = activations.normed.rows(0, rows)
        self._pending: Sums | None = None
        """What the product before left to be added to the residual stream."""

    def project(self, norm: Norm, linear: LinearWeights, y: Tensor) -> Sums:
        """The normalised residual stream · weightᵀ, without the bias. y: bf16 [rows, n]."""
        self._of_normalised(norm, linear.weight, y, Finish.STORE)
        return Sums(y)

    def add(self, x: Tensor, linear: LinearWeights) -> None:
        """x · weightᵀ onto the residual stream: in the product, or, if it has a bias, with the next norm."""
        if linear.bias is None:
            self._multiply(x, linear.weight, self.residual, Finish.ADD)
            return
        delta = self.activations.delta.rows(0, self.rows)
        self._wide(x, linear.weight, delta, bias=linear.bias)
        self._pending = Sums(delta)

    def feed_forward(self, norm: Norm, spec: DenseSpec, weights: DenseWeights) -> None:
        """down(act(gate) · up) of the normalised residual stream, onto it."""
        activated = part(self.activations.activated, self.rows, spec.intermediate)
        gate_up, library = weights.gate_up, self._parts.library
        is_fused = spec.activation is Activation.SILU and gate_up.bias is None
        if is_fused and self._arm(gate_up.weight, Finish.SWIGLU) in (Arm.SKINNY, Arm.Q4_GEMM):
            self._of_normalised(norm, gate_up.weight, activated, Finish.SWIGLU)
        else:
            both = part(self.activations.gate_up, self.rows, 2 * spec.intermediate)
            if gate_up.bias is None:
                self._of_normalised(norm, gate_up.weight, both, Finish.STORE)
            else:
                self._wide(self._normalised(norm), gate_up.weight, both, bias=gate_up.bias)
            self.calls.append(
                gated_activation(library, gate_up=both, out=activated, activation=spec.activation.value)
            )
        self.add(activated, weights.down)

    def head(self, norm: Norm, weight: Weight, logits: Tensor) -> None:
        """Of the normalised residual stream. logits: float32 [rows, vocab]; bf16 would make ties among the
        most likely tokens.
        """
        arm = pick_head_arm(self._parts, self.rows, weight)
        self._multiply(self._normalised(norm), weight, logits, Finish.STORE, arm)

    def _arm(self, weight: Weight, finish: Finish = Finish.STORE) -> Arm:
        return pick_arm(self._parts, self.rows, weight, finish)

    def _of_normalised(self, norm: Norm, weight: Weight, y: Tensor, finish: Finish) -> None:
        """Of the normalised residual stream: in one launch for one row of a complete stream."""
        is_skinny = self._arm(weight, finish) is Arm.SKINNY
        if is_skinny and self.rows <= MAX_FUSED_NORM_ROWS and self._pending is None:
            fused = FusedNorm(norm.weight, norm.spec.eps, norm.spec.weight_offset)
            self._skinny(self.residual, weight, y, finish, fused)
        else:
            self._multiply(self._normalised(norm), weight, y, finish)

    def _multiply(self, x: Tensor, weight: Weight, y: Tensor, finish: Finish, arm: Arm | None = None) -> None:
        arm = arm or self._arm(weight, finish)
        if arm is Arm.SKINNY:
            self._skinny(x, weight, y, finish)
        elif arm is Arm.Q4_GEMM:
            assert isinstance(weight, Q4Tiles)
            library, limits = self._parts.library, self._parts.limits
            self.calls.append(q4_gemm(library, limits, x=x, weight=weight, y=y, finish=finish))
        else:
            self._wide(x, weight, y, c=y if finish is Finish.ADD else None)

    def _skinny(
        self, x: Tensor, weight: Weight, y: Tensor, finish: Finish, norm: FusedNorm | None = None
    ) -> None:
        library, limits = self._parts.library, self._parts.limits
        self.calls.append(skinny_product(library, limits, x=x, weight=weight, y=y, finish=finish, norm=norm))

    def _normalised(self, norm: Norm) -> Tensor:
        """The normalised residual stream, bf16 [rows, hidden]."""
        self._normalise(norm, self._normed)
        return self._normed

    def _normalise(self, norm: Norm, out: Tensor, scale: Tensor | None = None) -> None:
        """Adds what the product before left, and normalises the residual stream.

        out: [rows, hidden] in bf16, or in e4m3 with its rows' `scale`.
        """
        pending, self._pending = self._pending, None
        launch = add_rms_norm(
            self._parts.library,
            residual=self.residual,
            weight=norm.weight,
            out=out,
            scale=scale,
            epsilon=norm.spec.eps,
            delta=pending.values if pending else None,
            delta_weight_scale=pending.weight_scale if pending else None,
            delta_row_scale=pending.row_scale if pending else None,
            weight_offset=norm.spec.weight_offset,
        )
        self.calls.append(launch)

    def _wide(
        self, x: Tensor, weight: Weight, y: Tensor, *, bias: Tensor | None = None, c: Tensor | None = None
    ) -> None:
        """By cuBLASLt, in bf16."""
        if isinstance(weight, Q4Tiles):
            weight = self._dequantised(weight)
        assert isinstance(weight, Tensor), "FP8 products of many rows are Fp8Products'"
        key = product_key(x, weight, y, biased=bias is not None, adds=c is not None)
        workspace = self._parts.buffers.workspace
        self.calls.append(
            self._parts.planner.plan(key).bind(x=x, w=weight, y=y, bias=bias, c=c, workspace=workspace)
        )

    def _dequantised(self, weight: Q4Tiles) -> Tensor:
        scratch = part(self._parts.buffers.scratch, weight.n, weight.k)
        self.calls.append(q4_dequantise(self._parts.library, tiles=weight, out=scratch))
        return scratch


def product_key(x: Tensor, weight: Tensor, y: Tensor, *, biased: bool = False, adds: bool = False) -> GemmKey:
    """cuBLASLt's product of these."""
    epilogue = Epilogue.BIAS if biased else Epilogue.ADD if adds else Epilogue.NONE
    n, k = weight.shape
    return GemmKey(y.shape[0], n, k, x=x.dtype, w=weight.dtype, y=y.dtype, epilogue=epilogue)
