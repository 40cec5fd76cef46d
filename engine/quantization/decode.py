"""Any stored weight back to float32. The reference for what a stored byte means."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine.quantization.tensor_type import TensorType

_PLAIN = {
    TensorType.F32: np.dtype("<f4"),
    TensorType.F16: np.dtype("<f2"),
    TensorType.BF16: np.dtype(ml_dtypes.bfloat16),
    TensorType.F8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
}


def decode(data: NDArray[np.uint8], type: TensorType) -> NDArray[np.float32]:
    """uint8 [rows, row bytes] to float32 [rows, columns], without any FP8 scale. Always a new array."""
    plain = _PLAIN.get(type)
    if plain is not None:
        return np.array(np.ascontiguousarray(data).view(plain), np.float32)
    values = gguf.quants.dequantize(np.ascontiguousarray(data), gguf.GGMLQuantizationType[type.name])
    return np.asarray(values, np.float32)


def apply_scale(
    values: NDArray[np.float32], scale: NDArray[np.float32], block: tuple[int, int] | None
) -> NDArray[np.float32]:
    """Multiplies float32 [rows, columns] in place by a scale per tensor, row or block; returns it.

    `scale` broadcasts against `values`, or has one element per `block` of (rows, columns), the last
    block of each dimension possibly cut short.
    """
    if block is not None:
        scale = scale.repeat(block[0], axis=0).repeat(block[1], axis=1)
        scale = scale[: values.shape[0], : values.shape[1]]
    values *= scale
    return values
