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
from engine.cuda.weights import DenseWeights, LinearWeights
from kernels.activation import gated_activation
from kernels.norm import add_rms_norm
from kernels.skinny import MAX_FUSED_NORM_ROWS, Finish, FusedNorm, fits, skinny_product
from kernels.tensor import Tensor


class Arm(StrEnum):
    """A way to compute a product."""

    SKINNY = "skinny"
    """kernels/skinny.cu: few rows."""
    CUBLASLT = "cublaslt"


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


def pick_arm(parts: Parts, rows: int, n: int, k: int, finish: Finish = Finish.STORE) -> Arm:
    """For y[rows, n] of a weight [n, k]; with SWIGLU [2 · n, k]."""
    return Arm.SKINNY if parts.skinny and fits(rows, n, k, finish) else Arm.CUBLASLT


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
        if self._arm(y, linear.weight) is Arm.SKINNY:
            self._skinny(norm, linear.weight, y, Finish.STORE)
        else:
            self._product(self._normalised(norm), linear.weight, y)
        return Sums(y)

    def add(self, x: Tensor, linear: LinearWeights) -> None:
        """x · weightᵀ onto the residual stream: in the product, or, if it has a bias, with the next norm."""
        if linear.bias is not None:
            delta = self.activations.delta.rows(0, self.rows)
            self._product(x, linear.weight, delta, bias=linear.bias)
            self._pending = Sums(delta)
        elif self._arm(self.residual, linear.weight) is Arm.SKINNY:
            library, limits, y = self._parts.library, self._parts.limits, self.residual
            self.calls.append(
                skinny_product(library, limits, x=x, weight=linear.weight, y=y, finish=Finish.ADD)
            )
        else:
            self._product(x, linear.weight, self.residual, c=self.residual)

    def feed_forward(self, norm: Norm, spec: DenseSpec, weights: DenseWeights) -> None:
        """down(act(gate) · up) of the normalised residual stream, onto it."""
        activated = part(self.activations.activated, self.rows, spec.intermediate)
        has_kernel = spec.activation is Activation.SILU and not spec.bias
        if has_kernel and self._arm(activated, weights.gate_up.weight, Finish.SWIGLU) is Arm.SKINNY:
            self._skinny(norm, weights.gate_up.weight, activated, Finish.SWIGLU)
        else:
            gate_up = part(self.activations.gate_up, self.rows, 2 * spec.intermediate)
            self._product(self._normalised(norm), weights.gate_up.weight, gate_up, bias=weights.gate_up.bias)
            library = self._parts.library
            self.calls.append(
                gated_activation(library, gate_up=gate_up, out=activated, activation=spec.activation.value)
            )
        self.add(activated, weights.down)

    def head(self, norm: Norm, weight: Tensor, logits: Tensor) -> None:
        """Of the normalised residual stream. logits: float32 [rows, vocab]; bf16 would make ties among the
        most likely tokens.
        """
        self._product(self._normalised(norm), weight, logits)

    def _arm(self, y: Tensor, weight: Tensor, finish: Finish = Finish.STORE) -> Arm:
        rows, n = y.shape
        return pick_arm(self._parts, rows, n, weight.shape[1], finish)

    def _skinny(self, norm: Norm, weight: Tensor, y: Tensor, finish: Finish) -> None:
        """Of the normalised residual stream: in one launch for one row of a complete stream."""
        fused = None
        if self.rows <= MAX_FUSED_NORM_ROWS and self._pending is None:
            fused = FusedNorm(norm.weight, norm.spec.eps, norm.spec.weight_offset)
        x = self.residual if fused else self._normalised(norm)
        library, limits = self._parts.library, self._parts.limits
        self.calls.append(skinny_product(library, limits, x=x, weight=weight, y=y, finish=finish, norm=fused))

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

    def _product(
        self, x: Tensor, weight: Tensor, y: Tensor, *, bias: Tensor | None = None, c: Tensor | None = None
    ) -> None:
        key = product_key(x, weight, y, biased=bias is not None, adds=c is not None)
        workspace = self._parts.buffers.workspace
        self.calls.append(
            self._parts.planner.plan(key).bind(x=x, w=weight, y=y, bias=bias, c=c, workspace=workspace)
        )


def product_key(x: Tensor, weight: Tensor, y: Tensor, *, biased: bool = False, adds: bool = False) -> GemmKey:
    """cuBLASLt's product of these."""
    epilogue = Epilogue.BIAS if biased else Epilogue.ADD if adds else Epilogue.NONE
    n, k = weight.shape
    return GemmKey(y.shape[0], n, k, x=x.dtype, w=weight.dtype, y=y.dtype, epilogue=epilogue)
