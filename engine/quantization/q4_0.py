"""q4_0: blocks of 32 weights along the input dimension, each one f16 scale and 16 bytes of nibbles.

Bytes of a block, 18: d as little-endian f16, then 16 bytes; byte i holds element i in its low nibble
and element i + 16 in its high nibble. value = d · (q − 8), q in 0 … 15. The same as GGUF's Q4_0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
"""Elements in a block."""

BLOCK_BYTES = 18


@dataclass(frozen=True, slots=True)
class Q4Rows:
    """A q4_0 matrix in the file's layout, row after row. Another order is another type."""

    data: NDArray[np.uint8]
    """uint8 [rows, columns / 32 · 18]."""

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the matrix."""
        return self.data.shape[0], self.data.shape[1] // BLOCK_BYTES * BLOCK

    def blocks(self) -> NDArray[np.uint8]:
        """uint8 [rows, blocks, 18], a view."""
        return self.data.reshape(self.data.shape[0], -1, BLOCK_BYTES)

    def scales(self) -> NDArray[np.float16]:
        """f16 [rows, blocks], a copy."""
        return np.ascontiguousarray(self.blocks()[..., :2]).view(np.float16)[..., 0]

    def nibbles(self) -> NDArray[np.uint8]:
        """q in 0 … 15, uint8 [rows, blocks, 32], in the order of the elements."""
        packed = self.blocks()[..., 2:]
        return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def quantise(values: NDArray[np.float32]) -> Q4Rows:
    """float32 [rows, columns] to q4_0; columns must be a multiple of 32.

    d = (the element of largest magnitude, the first among equals, with its sign) / −8, so that this
    element gets q = 0 exactly; the others are rounded half up and cut at 15. q counts in units of the
    float32 d; stored is d as f16. Raises ValueError for other shapes.
    """
    if values.ndim != 2 or values.shape[1] % BLOCK:
        raise ValueError(f"q4_0 needs rows of whole blocks of {BLOCK}, not an array of shape {values.shape}")
    blocks = np.ascontiguousarray(values, np.float32).reshape(values.shape[0], -1, BLOCK)
    largest = np.abs(blocks).argmax(axis=-1, keepdims=True)
    scale = np.take_along_axis(blocks, largest, axis=-1) / np.float32(-8)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
        steps = np.trunc(blocks * inverse + np.float32(8.5))
        stored = scale.astype(np.float16)
    # A subnormal d has no finite reciprocal; its f16 is zero anyway, so any q would do.
    quants = np.where(np.isfinite(steps), steps, np.float32(0)).clip(0, 15).astype(np.uint8)
    out = np.empty((*blocks.shape[:2], BLOCK_BYTES), np.uint8)
    out[..., :2] = stored.view(np.uint8)
    out[..., 2:] = quants[..., :16] | (quants[..., 16:] << 4)
    return Q4Rows(out.reshape(values.shape[0], -1))


def dequantise(rows: Q4Rows) -> NDArray[np.float32]:
    """float32 [rows, columns]: d, widened to float32, times q − 8."""
    signed = rows.nibbles().astype(np.int8) - np.int8(8)
    values = rows.scales().astype(np.float32)[..., None] * signed.astype(np.float32)
    return np.asarray(values, np.float32).reshape(rows.shape)
