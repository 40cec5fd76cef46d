"""FP8 e4m3 (the "fn" kind: no infinities, largest 448) with one float32 scale per row.

A row is a weight's output row or one token's activations; value = e4m3 · scale. Scales make each row's
largest magnitude 448, so nothing saturates but what rounding pushes over the edge.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

E4M3_MAX = 448.0

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """A matrix of e4m3 with a scale per row: weights by output row, or activations by token."""

    data: NDArray[np.uint8]
    """The e4m3 bytes, uint8 [rows, columns]."""
    scale: NDArray[np.float32]
    """float32 [rows], positive."""

    def __post_init__(self) -> None:
        if self.data.ndim != 2 or self.scale.shape != self.data.shape[:1]:
            raise ValueError(f"scales of shape {self.scale.shape} do not fit rows of {self.data.shape}")


def quantise_rows(values: NDArray[np.float32]) -> Fp8Rows:
    """float32 [rows, columns] with a dynamic scale per row: max |x| / 448, and 1 for a row of zeros."""
    largest = np.abs(values).max(axis=1, initial=0.0)
    scale = np.maximum(largest / np.float32(E4M3_MAX), np.finfo(np.float32).tiny).astype(np.float32)
    scale[largest == 0] = 1.0
    return Fp8Rows(to_e4m3(values / scale[:, None]), scale)


def dequantise_rows(rows: Fp8Rows) -> NDArray[np.float32]:
    """float32 [rows, columns]."""
    return np.asarray(from_e4m3(rows.data) * rows.scale[:, None], np.float32)


def to_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rounds to the nearest e4m3, ties to even; what lies beyond ±448 becomes ±448. NaN stays NaN."""
    cut = np.clip(values, np.float32(-E4M3_MAX), np.float32(E4M3_MAX))
    return cut.astype(_E4M3).view(np.uint8)


def from_e4m3(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The values of e4m3 bytes, exactly."""
    return np.array(data.view(_E4M3), np.float32)
