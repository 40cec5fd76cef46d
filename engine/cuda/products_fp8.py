"""The matrix products of a program whose linear layers are FP8.

Few rows go to kernels/skinny.cu, with x in bf16. More are quantised by row, by the kernel that makes them
where it can, multiplied by cuBLASLt, and left as raw sums: whoever reads those multiplies by both scales.
"""

from __future__ import annotations

from engine.config import Activation, DenseSpec
from engine.cuda.buffers import Activations, part
from engine.cuda.parts import Call, Parts
from engine.cuda.products import Norm, Products, Sums, product_key
from engine.cuda.weights import DenseWeights, LinearWeights, Weight
from kernels.activation import gated_activation, gated_activation_fp8
from kernels.fp8 import Fp8Rows, quantise_rows
from kernels.skinny import MAX_FUSED_NORM_ROWS, Finish, FusedNorm, WeightKind, fits, skinny_product
from kernels.tensor import DType, Tensor


class Fp8Products(Products):
    """Of FP8 weights without biases, but for q|k|v's; the head stays bf16."""

    def project(self, norm: Norm, linear: LinearWeights, y: Tensor) -> Sums:
        """The normalised residual stream · weightᵀ, without the bias. y: bf16 [rows, n]."""
        if self._is_skinny(linear.weight, Finish.STORE):
            self._few_rows_of(norm, linear.weight, y, Finish.STORE)
            return Sums(y)
        return self._raw_sums(self._quantised(norm), linear.weight, y)

    def add(self, x: Tensor, linear: LinearWeights) -> None:
        """x · weightᵀ onto the residual stream: in the product, or with the next norm. x: bf16 [rows, k]."""
        if self._is_skinny(linear.weight, Finish.ADD):
            self._few_rows(x, linear.weight, self.residual, Finish.ADD)
            return
        # What lies there has been read by now: queries by attention, gate|up by the activation.
        is_activated = x.address == self.activations.activated.address
        spare = self.activations.gate_up if is_activated else self.activations.query
        rows = fp8_rows_in(spare, *x.shape)
        self.calls.append(quantise_rows(self._parts.library, x=x, out=rows))
        self._leave(rows, linear)

    def feed_forward(self, norm: Norm, spec: DenseSpec, weights: DenseWeights) -> None:
        """down(act(gate) · up) of the normalised residual stream, onto it."""
        is_swiglu = spec.activation is Activation.SILU
        if is_swiglu and self._is_skinny(weights.gate_up.weight, Finish.SWIGLU):
            activated = part(self.activations.activated, self.rows, spec.intermediate)
            self._few_rows_of(norm, weights.gate_up.weight, activated, Finish.SWIGLU)
            self.add(activated, weights.down)
            return
        both = part(self.activations.gate_up, self.rows, 2 * spec.intermediate)
        sums = self.project(norm, weights.gate_up, both)
        if sums.row_scale is None or self._is_skinny(weights.down.weight, Finish.ADD):
            self.add(self._activated(sums, spec), weights.down)
        else:
            self._leave(self._activated_rows(sums, spec), weights.down)

    def _few_rows_of(self, norm: Norm, weight: Weight, y: Tensor, finish: Finish) -> None:
        """Of the normalised residual stream: in one launch for one row of a complete stream."""
        if self.rows <= MAX_FUSED_NORM_ROWS and self._pending is None:
            fused = FusedNorm(norm.weight, norm.spec.eps, norm.spec.weight_offset)
            self._few_rows(self.residual, weight, y, finish, fused)
        else:
            self._few_rows(self._normalised(norm), weight, y, finish)

    def _few_rows(
        self, x: Tensor, weight: Weight, y: Tensor, finish: Finish, norm: FusedNorm | None = None
    ) -> None:
        library, limits = self._parts.library, self._parts.limits
        self.calls.append(skinny_product(library, limits, x=x, weight=weight, y=y, finish=finish, norm=norm))

    def _is_skinny(self, weight: Weight, finish: Finish) -> bool:
        """Whether x stays bf16. With SWIGLU the weight is gate over up."""
        n, k = weight.shape
        n //= 2 if finish is Finish.SWIGLU else 1
        return self._parts.skinny and fits(self.rows, n, k, finish, WeightKind.FP8)

    def _activated(self, sums: Sums, spec: DenseSpec) -> Tensor:
        """bf16 [rows, inter]."""
        activated = part(self.activations.activated, self.rows, spec.intermediate)
        launch = gated_activation(
            self._parts.library,
            gate_up=sums.values,
            weight_scale=sums.weight_scale,
            row_scale=sums.row_scale,
            out=activated,
            activation=spec.activation.value,
        )
        self.calls.append(launch)
        return activated

    def _activated_rows(self, sums: Sums, spec: DenseSpec) -> Fp8Rows:
        """[rows, inter]."""
        assert sums.weight_scale is not None
        assert sums.row_scale is not None
        activated = fp8_rows_in(self.activations.activated, self.rows, spec.intermediate)
        launch = gated_activation_fp8(
            self._parts.library,
            self._parts.limits,
            gate_up=sums.values,
            weight_scale=sums.weight_scale,
            row_scale=sums.row_scale,
            out=activated,
            activation=spec.activation.value,
        )
        self.calls.append(launch)
        return activated

    def _quantised(self, norm: Norm) -> Fp8Rows:
        """The normalised residual stream, [rows, hidden]."""
        rows = fp8_rows_in(self.activations.normed, *self.residual.shape)
        self._normalise(norm, rows.values, rows.scale)
        return rows

    def _leave(self, x: Fp8Rows, linear: LinearWeights) -> None:
        """x · weightᵀ, for the next norm to add."""
        delta = self.activations.delta.rows(0, self.rows)
        self._pending = self._raw_sums(x, linear.weight, delta)

    def _raw_sums(self, x: Fp8Rows, weight: Weight, y: Tensor) -> Sums:
        assert isinstance(weight, Fp8Rows)
        key = product_key(x.values, weight.values, y)
        workspace = self._parts.buffers.workspace
        self.calls.append(
            self._parts.planner.plan(key).bind(x=x.values, w=weight.values, y=y, workspace=workspace)
        )
        return Sums(y, weight.scale, x.scale)


def fp8_rows_in(buffer: Tensor, rows: int, columns: int) -> Fp8Rows:
    """A bf16 buffer's bytes as rows of e4m3, with their scales behind them. columns: a multiple of 16.

    Raises ValueError if they do not fit; in bf16 [rows, columns] they do.
    """
    values = Tensor(buffer.address, (rows, columns), DType.E4M3)
    scale = Tensor(buffer.address + values.bytes, (rows,), DType.F32)
    if values.bytes + scale.bytes > buffer.bytes:
        raise ValueError(f"{rows} × {columns} elements of e4m3 in a buffer of {buffer.bytes} B")
    return Fp8Rows(values, scale)


def make_products(parts: Parts, activations: Activations, rows: int, calls: list[Call]) -> Products:
    """For the tier that the weights are held in."""
    weight = parts.weights.layers[0].mixer.o.weight
    kind = Fp8Products if isinstance(weight, Fp8Rows) else Products
    return kind(parts, activations, rows, calls)
