"""q4_0 tiles in numpy: the layout packed and unpacked, and the twins of the kernels that use it."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.quantization.q4_0 import BLOCK, BLOCK_BYTES, Q4Rows, dequantise, quantise
from kernels.q4 import TILE_COLUMNS, TILE_ROWS, tile_shapes
from tests.unit.cuda_twin_memory import BF16, F16, F32, U8, array

NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The element of 8 at each nibble of a word, from the low end."""


def pack(rows: Q4Rows) -> tuple[np.ndarray, np.ndarray]:
    """(quants u8 [n / 16, ⌈k / 64⌉, 512], scales f16 [n / 16, ⌈k / 64⌉, 8, 4]) of a file's rows."""
    n, k = rows.shape
    columns = -(-k // TILE_COLUMNS)
    nibbles = np.full((n, columns * 2, BLOCK), 8, np.uint32)
    nibbles[:, : k // BLOCK] = rows.nibbles()
    scales = np.zeros((n, columns * 2), np.float16)
    scales[:, : k // BLOCK] = rows.scales()
    # [tile row, half, l / 4, tile column, block, l % 4, element] → [tile row, tile column, lane, block, half]
    parts = nibbles.reshape(n // TILE_ROWS, 2, 8, columns, 2, 4, 8)[..., NIBBLE_ORDER]
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    words = (parts << shifts).sum(axis=-1, dtype=np.uint32).transpose(0, 3, 2, 5, 4, 1)
    quants = np.ascontiguousarray(words).astype("<u4").view(np.uint8)
    tiled = scales.reshape(n // TILE_ROWS, 2, 8, columns, 2).transpose(0, 3, 2, 4, 1)
    return quants.reshape(n // TILE_ROWS, columns, -1), np.ascontiguousarray(tiled).reshape(-1, columns, 8, 4)


def unpack(quants: np.ndarray, scales: np.ndarray, k: int) -> Q4Rows:
    """The rows that `pack` made tiles of."""
    tile_rows, columns = quants.shape[:2]
    words = np.ascontiguousarray(quants).view("<u4").reshape(tile_rows, columns, 8, 4, 2, 2)
    nibbles = np.empty((*words.shape, 8), np.uint8)
    for place, element in enumerate(NIBBLE_ORDER):
        nibbles[..., element] = words >> np.uint32(4 * place) & np.uint32(15)
    n = tile_rows * TILE_ROWS
    q = nibbles.transpose(0, 5, 2, 1, 4, 3, 6).reshape(n, columns * 2, BLOCK)[:, : k // BLOCK]
    d = scales.reshape(tile_rows, columns, 8, 2, 2).transpose(0, 4, 2, 1, 3).reshape(n, columns * 2)
    out = np.empty((n, k // BLOCK, BLOCK_BYTES), np.uint8)
    out[..., :2] = np.ascontiguousarray(d[:, : k // BLOCK, None]).view(np.uint8)
    out[..., 2:] = q[..., :16] | q[..., 16:] << 4
    return Q4Rows(out.reshape(n, -1))


def at(quants: int, scales: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The two arrays of tiles at these addresses."""
    shapes = tile_shapes(n, k)
    return array(quants, U8, *shapes["quants"][0]), array(scales, F16, *shapes["scales"][0])


def weights(quants: int, scales: int, n: int, k: int) -> np.ndarray:
    """float32 [n, k] of the tiles at these addresses."""
    return dequantise(unpack(*at(quants, scales, n, k), k))


def _store(rows: Q4Rows, quants: int, scales: int) -> None:
    for target, source in zip(at(quants, scales, *rows.shape), pack(rows), strict=True):
        target[:] = source


def q4_quantise(grid: Any, kinds: list[str], values: int, quants: int, scales: int, k: int) -> None:
    _store(quantise(array(values, BF16, grid[1] * TILE_ROWS, k).astype(F32)), quants, scales)


def q4_repack(grid: Any, kinds: list[str], raw: int, quants: int, scales: int, k: int) -> None:
    _store(Q4Rows(array(raw, U8, grid[1] * TILE_ROWS, k // BLOCK * BLOCK_BYTES)), quants, scales)


def q4_dequantise(grid: Any, kinds: list[str], quants: int, scales: int, out: int, k: int) -> None:
    n = grid[1] * TILE_ROWS
    array(out, BF16, n, k)[:] = weights(quants, scales, n, k)


def q4_gemm(
    grid: Any,
    kinds: list[str],
    x: int,
    quants: int,
    scales: int,
    y: int,
    rows: int,
    n: int,
    k: int,
    finish: int,
    wide: int,
) -> None:
    """All of y; the grid must cover it."""
    columns, warps = int(kinds[0]), int(kinds[1])
    height = warps * TILE_ROWS // (2 if finish == 2 else 1)
    assert grid[1] == -(-n // height)
    assert grid[2] == -(-rows // columns)
    assert 1 <= grid[0] <= -(-k // TILE_COLUMNS)
    products = array(x, BF16, rows, k).astype(F32) @ weights(quants, scales, n * (1 + (finish == 2)), k).T
    target = array(y, F32 if wide else BF16, rows, n)
    if finish == 1:
        target[:] = target.astype(F32) + products
    elif finish == 2:
        gate = products[:, :n]
        target[:] = gate / (1 + np.exp(-gate)) * products[:, n:]
    else:
        target[:] = products
