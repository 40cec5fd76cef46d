"""Weights as a tier holds them, back in float32: what the CUDA engine multiplies by, without its kernels.

Knows canonical names; no layer and no file.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.checkpoint import TensorType
from engine.checkpoint.tensor import Tensor
from engine.errors import UnsupportedModelError
from engine.options import KvDtype, Precision
from engine.quantization import fp8, q4_0
from engine.reference.arrays import FloatArray
from engine.reference.ops.moe import round_bfloat16

_KEPT = (".router.weight", ".deltanet.a.weight", ".deltanet.b.weight")
"""Small products that decide much: experts and decays."""


@dataclass(frozen=True, slots=True)
class Holding:
    """How the reference engine holds a model."""

    precision: Precision = Precision.AUTO
    """AUTO: the checkpoint's own values."""
    kv_dtype: KvDtype = KvDtype.AUTO
    """AUTO: float32."""
    fp8_activations: bool = False
    """Round the inputs of the layers' linear products to e4m3, a scale per token: what the CUDA engine's fp8
    tier does to steps of more than 8 rows."""

    def plain(self, tensor: Tensor) -> FloatArray:
        """Embedding, norm or bias, float32: in bf16 in every tier but AUTO, as on a GPU."""
        values = tensor.to_float32()
        is_kept = self.precision is Precision.AUTO or ".deltanet." in tensor.name
        return values if is_kept else round_bfloat16(values)

    def matrix(self, tensor: Tensor) -> FloatArray:
        """A linear layer's or the head's weight, float32 [n, k].

        What is stored in the tier's form already is taken as it is; all else goes through bf16, as on its way
        to a GPU. Raises UnsupportedModelError for a matrix that the tier cannot hold.
        """
        if self._is_as_stored(tensor):
            return tensor.to_float32()
        values = round_bfloat16(tensor.to_float32())
        if self.precision is Precision.Q4:
            if tensor.shape[1] % q4_0.BLOCK:
                raise UnsupportedModelError(
                    f"{tensor.name} has {tensor.shape[1]} columns; q4 holds multiples of {q4_0.BLOCK} only."
                )
            return q4_0.dequantise(q4_0.quantise(values))
        if self.precision is Precision.FP8 and tensor.name.startswith("layers."):
            return fp8.dequantise_rows(fp8.quantise_rows(values))
        return values

    def _is_as_stored(self, tensor: Tensor) -> bool:
        if self.precision is Precision.AUTO or tensor.name.endswith(_KEPT):
            return True
        if self.precision is Precision.Q4:
            return tensor.type is TensorType.Q4_0
        if self.precision is Precision.FP8:
            return tensor.type is TensorType.F8_E4M3 and tensor.scale_block is None
        return tensor.type is TensorType.BF16

    def notes(self) -> list[str]:
        """What people may not expect."""
        if self.precision in (Precision.AUTO, Precision.BF16):
            return []
        head = "; the head is kept in bf16" if self.precision is Precision.FP8 else ""
        return [f"the reference engine holds {self.precision} weights decoded, in float32{head}"]


AS_STORED = Holding()
"""The checkpoint's own values, all in float32."""


def as_fp8(rows: FloatArray) -> FloatArray:
    """float32 [rows, k] through e4m3 with a scale per row, which is a token."""
    return fp8.dequantise_rows(fp8.quantise_rows(np.ascontiguousarray(rows)))
