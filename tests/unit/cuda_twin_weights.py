"""Weights as the products' kernels read them, decoded from their bytes; addresses are host memory."""

from __future__ import annotations

import numpy as np

from tests.unit.cuda_twin_memory import BF16, E4M3, F16, F32, U32, array

_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])
"""Elements of a word of q4 tiles, from the low nibble up."""


def decoded(decoder: str, values: int, scales: int, n: int, k: int) -> np.ndarray:
    """float32 [n, k]. decoder: the class of weights.cuh."""
    if decoder == "Bf16Weights":
        return array(values, BF16, n, k).astype(F32)
    if decoder == "Fp8Weights":
        return np.asarray(array(values, E4M3, n, k).astype(F32) * array(scales, F32, n)[:, None])
    assert decoder == "Q4Weights"
    return q4_tiles(values, scales, n, k)


def q4_tiles(quants: int, scales: int, n: int, k: int) -> np.ndarray:
    """float32 [n, k], from tiles of 16 × 64: lanes have words of two rows, for each of two blocks."""
    columns = -(-k // 64)
    words = array(quants, U32, n // 16, columns, 8, 4, 2, 2, 1)  # tile, column, row, quad, block, high
    nibbles = np.empty((*words.shape[:-1], 8), F32)
    nibbles[..., _ORDER] = (words >> (4 * np.arange(8, dtype=U32))) & 15
    whole = nibbles.transpose(0, 5, 2, 1, 4, 3, 6).reshape(n, columns * 64) - 8
    steps = array(scales, F16, n // 16, columns, 8, 2, 2).astype(F32)  # tile, column, row, block, high
    return np.asarray(whole * np.repeat(steps.transpose(0, 4, 2, 1, 3).reshape(n, -1), 32, axis=1))[:, :k]
