"""The matrix products of a program whose linear layers are FP8.

One row goes to kernels/skinny.cu, with x in bf16. More are quantised by row, by the kernel that makes them
where it can, multiplied by cuBLASLt, and left as raw sums: whoever reads those multiplies by both scales.
"""

from __future__ import annotations

from engine.config import Activation, DenseSpec
from engine.cuda.buffers import Activations, part
from engine.cuda.parts import Call, Parts
from engine.cuda.products import Arm, Norm, Products, Sums, product_key
from engine.cuda.weights import DenseWeights, LinearWeights, Weight
from kernels.activation import gated_activation, gated_activation_fp8
from kernels.fp8 import Fp8Rows, quantise_rows
from kernels.skinny import Finish
from kernels.tensor import DType, Tensor


class Fp8Products(Products):
    """Of FP8 weights without biases, but for q|k|v's; the head stays bf16."""

    def project(self, norm: Norm, linear: LinearWeights, y: Tensor) -> Sums:
        """The normalised residual stream · weightᵀ, without the bias. y: bf16 [rows, n]."""
        if self._arm(linear.weight) is not Arm.FP8:
            return super().project(norm, linear, y)
        return self._raw_sums(self._quantised(norm), linear.weight, y)

    def add(self, x: Tensor, linear: LinearWeights) -> None:
        """x · weightᵀ onto the residual stream: in the product, or with the next norm. x: bf16 [rows, k]."""
        if self._arm(linear.weight, Finish.ADD) is not Arm.FP8:
            super().add(x, linear)
            return
        # What lies there has been read by now: queries by attention, gate|up by the activation.
        is_activated = x.address == self.activations.activated.address
        spare = self.activations.gate_up if is_activated else self.activations.query
        rows = fp8_rows_in(spare, *x.shape)
        self.calls.append(quantise_rows(self._parts.library, x=x, out=rows))
        self._leave(rows, linear)

    def feed_forward(self, norm: Norm, spec: DenseSpec, weights: DenseWeights) -> None:
        """down(act(gate) · up) of the normalised residual stream, onto it."""
        finish = Finish.SWIGLU if spec.activation is Activation.SILU else Finish.STORE
        if self._arm(weights.gate_up.weight, finish) is not Arm.FP8:
            super().feed_forward(norm, spec, weights)
            return
        both = part(self.activations.gate_up, self.rows, 2 * spec.intermediate)
        sums = self._raw_sums(self._quantised(norm), weights.gate_up.weight, both)
        if self._arm(weights.down.weight, Finish.ADD) is Arm.FP8:
            self._leave(self._activated_rows(sums, spec), weights.down)
        else:
            self.add(self._activated(sums, spec), weights.down)

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
