"""Weights as the reference engine multiplies by them: float32, those of the same input merged.

Knows canonical tensor names and layer specs; no file and no family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.checkpoint import Checkpoint, TensorType
from engine.checkpoint.tensor import Tensor
from engine.config import NormSpec
from engine.reference.arrays import FloatArray
from engine.reference.holding import AS_STORED, Holding, as_fp8
from engine.reference.ops.linear import linear


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x · weightᵀ + bias."""

    weight: FloatArray
    """float32 [outputs, inputs]."""
    bias: FloatArray | None = None
    """float32 [outputs]."""
    fp8_input: bool = False
    """Whether inputs are rounded to e4m3."""

    def __call__(self, x: FloatArray) -> FloatArray:
        """float32 [rows, inputs] to [rows, outputs]; rows have been padded to a proved width."""
        return linear(as_fp8(x) if self.fp8_input else x, self.weight, self.bias)


class WeightReader:
    """Reads weights under a prefix of canonical names, and tells how many bytes it has read."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str = "",
        count: Callable[[int], None] | None = None,
        holding: Holding = AS_STORED,
    ) -> None:
        self._checkpoint = checkpoint
        self._prefix = prefix
        self._count = count
        self._holding = holding

    def under(self, prefix: str) -> WeightReader:
        """A reader of the names below `prefix`."""
        return WeightReader(self._checkpoint, f"{self._prefix}{prefix}.", self._count, self._holding)

    def array(self, name: str) -> FloatArray:
        """A tensor that is not multiplied by as a matrix, in float32."""
        return self._read(name, self._holding.plain)

    def matrix(self, name: str) -> FloatArray:
        """A linear layer's weight as the tier holds it, in float32."""
        return self._read(name, self._holding.matrix)

    def _read(self, name: str, decode: Callable[[Tensor], FloatArray]) -> FloatArray:
        tensor = self._checkpoint.tensor(self._prefix + name)
        values = decode(tensor)
        if self._count is not None:
            self._count(tensor.n_bytes)
        return values

    def norm(self, name: str, spec: NormSpec) -> FloatArray:
        """A norm's weight with the family's offset added."""
        return self.array(f"{name}.weight") + np.float32(spec.weight_offset)

    def linear(self, *names: str, bias: bool = False) -> Linear:
        """Projections of the same input as one, their outputs side by side in the order named."""
        weights = [self.matrix(f"{name}.weight") for name in names]
        return self.joined(weights, self.biases(*names) if bias else None)

    def joined(self, weights: list[FloatArray], biases: list[FloatArray] | None = None) -> Linear:
        """Matrices [outputs, inputs] of the same input as one Linear."""
        weight = weights[0] if len(weights) == 1 else np.concatenate(weights)
        bias = None if biases is None else np.concatenate(biases)
        return Linear(weight, bias, self._holding.fp8_activations and self._prefix.startswith("layers."))

    def biases(self, *names: str) -> list[FloatArray]:
        return [self.array(f"{name}.bias") for name in names]

    def is_bfloat16(self, name: str) -> bool:
        """Whether the checkpoint stores the tensor in bf16."""
        return self._checkpoint.tensor(self._prefix + name).type is TensorType.BF16
