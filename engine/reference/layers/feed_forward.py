"""Dense gated feed-forward. Knows no slot and no position."""

from __future__ import annotations

from engine.config import Activation, DenseSpec
from engine.reference.arrays import FloatArray
from engine.reference.batch import RaggedBatch
from engine.reference.ops.activation import gelu_tanh_mul, silu_mul
from engine.reference.weights import Linear, WeightReader

GATED = {Activation.SILU: silu_mul, Activation.GELU_TANH: gelu_tanh_mul}
"""act(gate) · up for [rows, gate | up]."""


class DenseFeedForward:
    """down(act(gate(x)) · up(x))."""

    def __init__(self, spec: DenseSpec, reader: WeightReader) -> None:
        self._gated = GATED[spec.activation]
        self._gate_up = reader.linear("gate", "up", bias=spec.bias)
        self._down = reader.linear("down", bias=spec.bias)

    def linears(self) -> list[Linear]:
        return [self._gate_up, self._down]

    def __call__(self, hidden: FloatArray, batch: RaggedBatch) -> FloatArray:
        """float32 [padded rows, hidden] to the same."""
        return self._down(self._gated(self._gate_up(hidden)))
