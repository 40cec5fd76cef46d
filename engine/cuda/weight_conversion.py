"""Any rows of a stored weight as bf16, written where they are wanted. Knows no device and no file format."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.tensor import Tensor as StoredTensor
from engine.quantization.tensor_type import TensorType

_ROUNDING = np.uint32(0x7FFF)
_QUIET = np.uint32(0x0040_0000)


def row_step(stored: StoredTensor) -> int:
    """Rows may be cut at multiples of this: one block's rows where the scale is per block."""
    return 1 if stored.scale_block is None else stored.scale_block[0]


def write_bf16(stored: StoredTensor, start: int, stop: int, target: NDArray[np.uint16]) -> None:
    """Rows start … stop − 1 of a stored matrix as bf16 bits; a vector is one row.

    start: a multiple of row_step(). target: uint16 [stop − start, columns], contiguous.
    """
    rows = stored.data[start:stop]
    if stored.type is TensorType.BF16:
        np.copyto(target.view(np.uint8), rows)
        return
    columns = stored.shape[-1]
    part = replace(stored, shape=(stop - start, columns), data=rows, scale=_scale_rows(stored, start, stop))
    round_to_bf16(part.to_float32(), target)


def row_scales(stored: StoredTensor, start: int, stop: int) -> NDArray[np.float32]:
    """The scale of each of the rows start … stop − 1, float32 [stop − start], of one per row or per tensor.

    Raises ValueError for scales per block.
    """
    scale = _scale_rows(stored, start, stop)
    if scale is None or stored.scale_block is not None:
        raise ValueError(f"{stored.name} has no scale per row or tensor")
    return np.broadcast_to(scale[:, 0], (stop - start,))


def round_to_bf16(values: NDArray[np.float32], target: NDArray[np.uint16]) -> None:
    """Rounds to the nearest, ties to even; NaN stays NaN. `values` is used up.

    In integers, because numpy holds the GIL while it casts to a type it does not know itself.
    """
    bits = values.view(np.uint32)
    is_nan = np.isnan(values)
    if is_nan.any():
        bits[is_nan] |= _QUIET
        bits[is_nan] &= np.uint32(0xFFFF_0000)
    odd = bits >> np.uint32(16)
    odd &= np.uint32(1)
    odd += _ROUNDING
    bits += odd
    bits >>= np.uint32(16)
    np.copyto(target, bits.reshape(target.shape), casting="unsafe")


def _scale_rows(stored: StoredTensor, start: int, stop: int) -> NDArray[np.float32] | None:
    """The scale of those rows alone."""
    scale = stored.scale
    if scale is None or len(scale) == 1:
        return scale
    step = row_step(stored)
    return scale[start // step : -(-stop // step)]
