"""One weight tensor as it lies in its file: raw bytes, their type, and the way to float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.quantization.decode import apply_scale, decode
from engine.quantization.tensor_type import TensorType


@dataclass(frozen=True, slots=True)
class Tensor:
    """A weight under its canonical name. Its pages are read from disk when `data` is first touched."""

    name: str
    """See engine.config.tensors."""
    type: TensorType
    shape: tuple[int, ...]
    """Logical, [rows, columns] for matrices, [n] for vectors."""
    data: NDArray[np.uint8]
    """uint8 [rows, row bytes] (vectors: [1, bytes]), read-only and in C order: a view of the mapped file
    wherever the file has the rows in this order."""
    scale: NDArray[np.float32] | None = None
    """For F8_E4M3, weight = value · scale: float32 [1, 1] per tensor, [rows, 1] per row, or
    [ceil(rows / block rows), ceil(columns / block columns)] per block."""
    scale_block: tuple[int, int] | None = None
    """Rows and columns under one element of `scale`, where it is per block."""

    @property
    def n_bytes(self) -> int:
        """Stored bytes, scale included."""
        return int(self.data.nbytes) + (0 if self.scale is None else int(self.scale.nbytes))

    def to_float32(self) -> NDArray[np.float32]:
        """The values, float32 of `shape`; always a new array."""
        values = decode(self.data, self.type)
        if self.scale is not None:
            values = apply_scale(values, self.scale, self.scale_block)
        return values.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor under its file's own name, before it is known what it is for."""

    name: str
    type: TensorType | str
    """A str names a type that only tensors nobody needs may have."""
    shape: tuple[int, ...]
    """Slowest dimension first."""
    read: Callable[[], NDArray[np.uint8]] = field(repr=False)
    """The bytes, uint8 [n], as a view of the mapped file."""
