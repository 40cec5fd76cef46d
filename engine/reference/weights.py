"""Weights as the reference engine multiplies by them: float32, those of the same input merged.

Knows canonical tensor names and layer specs; no file and no family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.checkpoint import Checkpoint, TensorType
from engine.config import NormSpec
from engine.reference.arrays import FloatArray
from engine.reference.ops.linear import linear


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x · weightᵀ + bias."""

    weight: FloatArray
    """float32 [outputs, inputs]."""
    bias: FloatArray | None = None
    """float32 [outputs]."""

    def __call__(self, x: FloatArray) -> FloatArray:
        """float32 [rows, inputs] to [rows, outputs]; rows have been padded to a proved width."""
        return linear(x, self.weight, self.bias)


class WeightReader:
    """Reads weights under a prefix of canonical names, and tells how many bytes it has read."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str = "", count: Callable[[int], None] | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._prefix = prefix
        self._count = count

    def under(self, prefix: str) -> WeightReader:
        """A reader of the names below `prefix`."""
        return WeightReader(self._checkpoint, f"{self._prefix}{prefix}.", self._count)

    def array(self, name: str) -> FloatArray:
        """A tensor as it is, in float32."""
        tensor = self._checkpoint.tensor(self._prefix + name)
        values: FloatArray = tensor.to_float32()
        if self._count is not None:
            self._count(tensor.n_bytes)
        return values

    def norm(self, name: str, spec: NormSpec) -> FloatArray:
        """A norm's weight with the family's offset added."""
        return self.array(f"{name}.weight") + np.float32(spec.weight_offset)

    def linear(self, *names: str, bias: bool = False) -> Linear:
        """Projections of the same input as one, their outputs side by side in the order named."""
        weights = [self.array(f"{name}.weight") for name in names]
        return joined(weights, self.biases(*names) if bias else None)

    def biases(self, *names: str) -> list[FloatArray]:
        return [self.array(f"{name}.bias") for name in names]

    def is_bfloat16(self, name: str) -> bool:
        """Whether the checkpoint stores the tensor in bf16."""
        return self._checkpoint.tensor(self._prefix + name).type is TensorType.BF16


def joined(weights: list[FloatArray], biases: list[FloatArray] | None = None) -> Linear:
    """Matrices [outputs, inputs] of the same input as one Linear."""
    weight = weights[0] if len(weights) == 1 else np.concatenate(weights)
    return Linear(weight, None if biases is None else np.concatenate(biases))
