"""Small regions that cross between host and device: one layout, on the device and in pinned host memory.

Knows no model. A region crosses in one copy; the arrays in it are named.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.cuda.device import PinnedBuffer
from engine.cuda.memory import Arena, Layout
from kernels.tensor import DType, Tensor

PART = "exchange"
"""What regions count as in the memory plan."""

_NUMPY_TYPES: dict[DType, type] = {
    DType.I32: np.int32,
    DType.U32: np.uint32,
    DType.F32: np.float32,
    DType.U8: np.uint8,
}


class Region:
    """A layout to be placed in the engine's arena as one tensor, and mirrored in pinned memory."""

    def __init__(self, name: str, layout: Layout) -> None:
        self.name = name
        self.layout = layout

    def reserve(self, arena: Layout) -> None:
        arena.add(PART, self.name, (self.layout.bytes,), DType.U8)

    def on_device(self, arena: Arena) -> Arena:
        """The region's tensors by name."""
        return Arena(self.layout, arena.tensor(self.name).address)

    def span(self, first: str, last: str) -> tuple[int, int]:
        """(offset, bytes) from the start of one tensor to the end of another behind it."""
        places = self.layout.reservations
        start = places[first].offset
        return start, places[last].offset + places[last].bytes - start


class HostRegion:
    """The region in pinned host memory."""

    def __init__(self, region: Region) -> None:
        self._buffer = PinnedBuffer(max(1, region.layout.bytes))
        self.address = self._buffer.address
        self._arrays: dict[str, NDArray[Any]] = {
            name: self._buffer.array(place.shape, _NUMPY_TYPES[place.dtype], place.offset)
            for name, place in region.layout.reservations.items()
        }

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._arrays[name]

    def close(self) -> None:
        """Idempotent; the arrays must not be used any more."""
        self._arrays.clear()
        self._buffer.close()


def device_view(tensor: Tensor, offset: int, shape: tuple[int, ...], dtype: DType) -> Tensor:
    """Part of a region's bytes, from `offset` on, as a tensor. Raises ValueError beyond the end."""
    part = Tensor(tensor.address + offset, shape, dtype)
    if offset < 0 or offset + part.bytes > tensor.bytes:
        raise ValueError(f"{part.bytes} B at {offset} of a region of {tensor.bytes} B")
    return part
