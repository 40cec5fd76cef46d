"""The scale beside an FP8 weight: which layout it has, and the part of it that belongs to some rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.tensor import SourceTensor
from engine.config import WeightFormat, WeightScheme
from engine.errors import CheckpointError
from engine.quantization.decode import decode
from engine.quantization.tensor_type import TensorType

_SCALE_TYPES = (TensorType.F32, TensorType.BF16, TensorType.F16)


@dataclass(frozen=True, slots=True)
class ScaleLayout:
    """How a scale covers a matrix."""

    shape: tuple[int, int]
    """Of the scale: [1, 1] per tensor, [rows, 1] per row, or one element per block."""
    block: tuple[int, int] | None
    """Rows and columns of a block."""

    def rows(self, scale: NDArray[np.float32], first: int, n_rows: int) -> NDArray[np.float32]:
        """The part for rows first … first + n_rows − 1; `first` starts a block."""
        if self.shape == (1, 1):
            return scale
        step = 1 if self.block is None else self.block[0]
        return scale[first // step : -(-(first + n_rows) // step)]

    def can_split_at(self, row: int) -> bool:
        return self.block is None or row % self.block[0] == 0


def scale_layout(
    scale_shape: tuple[int, ...], shape: tuple[int, int], weight_format: WeightFormat
) -> ScaleLayout | None:
    """The layout of a scale of `scale_shape` over a matrix of `shape`; None if it fits no known one."""
    rows, columns = shape
    if scale_shape in ((), (1,), (1, 1)):
        return ScaleLayout((1, 1), None)
    if scale_shape in ((rows,), (rows, 1)):
        return ScaleLayout((rows, 1), None)
    block = weight_format.block
    if weight_format.scheme is WeightScheme.FP8_BLOCK and block is not None:
        blocks = (-(-rows // block[0]), -(-columns // block[1]))
        if scale_shape == blocks:
            return ScaleLayout(blocks, block)
    return None


def is_scale(source: SourceTensor) -> bool:
    """Whether its elements can be a scale's."""
    return source.type in _SCALE_TYPES


def read_scale(source: SourceTensor) -> NDArray[np.float32]:
    """A scale's elements, float32 [n]. Raises CheckpointError, naming it, if one is no number."""
    values = read_plain(source)
    if not np.isfinite(values).all():
        index = int(np.flatnonzero(~np.isfinite(values))[0])
        raise CheckpointError(f"scale {source.name!r} has {values[index]} at {index}: it must be finite")
    return values


def read_plain(source: SourceTensor) -> NDArray[np.float32]:
    """A small plain tensor, float32 [n]."""
    return decode(source.read().reshape(1, -1), TensorType(source.type)).reshape(-1)
