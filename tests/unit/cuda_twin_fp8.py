"""Numpy twins of what FP8 kernels do: rows of e4m3 with a scale each, as the reference engine makes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.quantization import fp8
from tests.unit.cuda_twin_memory import BF16, F32, U8, array


def quantise(grid: Any, kinds: list[str], x: int, out: int, scale: int, k: int) -> None:
    store(array(x, BF16, grid[0], k).astype(F32), True, out, scale)


def store(values: np.ndarray, quantised: bool, out: int, scale: int) -> None:
    """Writes rows of floats as bf16, or as e4m3 with their scales."""
    if not quantised:
        array(out, BF16, *values.shape)[:] = values
        return
    rows = fp8.quantise_rows(values)
    array(out, U8, *values.shape)[:] = rows.data
    array(scale, F32, len(values))[:] = rows.scale
