"""The layout of q4_0 tiles, against its description word by word, and what the wrappers refuse."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from engine.quantization.q4_0 import Q4Rows, quantise
from kernels.device import DeviceLimits
from kernels.q4 import Q4Tiles, q4_dequantise, q4_quantise, q4_repack, tile_shapes
from kernels.q4_gemm import MAX_CLUSTER, SLAB, VARIANTS, fits, pick_plan, q4_gemm
from kernels.skinny import Finish
from kernels.tensor import DType, Tensor
from tests.unit import cuda_twin_q4 as twin

H200 = DeviceLimits((9, 0), 132, 232448, 62914560)
A100 = DeviceLimits((8, 0), 108, 166912, 41943040)
NO_LIBRARY: Any = None
"""Shapes are checked before the library is asked for anything."""
SHAPES = [(16, 32), (16, 64), (48, 96), (32, 160), (64, 576)]


def random_rows(n: int, k: int) -> Q4Rows:
    return quantise(np.random.default_rng(n * k).standard_normal((n, k), np.float32))


def tiles(n: int, k: int) -> Q4Tiles:
    """At no address in particular."""
    return Q4Tiles(**{name: Tensor(4096, *what) for name, what in tile_shapes(n, k).items()}, n=n, k=k)


def on_host(n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Poisoned buffers of a weight."""
    shapes = tile_shapes(n, k)
    return np.full(shapes["quants"][0], 0xFF, np.uint8), np.full(shapes["scales"][0], np.nan, np.float16)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_packing_keeps_every_bit(n: int, k: int) -> None:
    rows = random_rows(n, k)
    np.testing.assert_array_equal(twin.unpack(*twin.pack(rows), k).data, rows.data)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_word_is_where_its_lane_looks(n: int, k: int) -> None:
    rows = random_rows(n, k)
    nibbles, d = rows.nibbles(), rows.scales()
    quants, scales = twin.pack(rows)
    words = quants.view("<u4").reshape(n // 16, -1, 32, 4)
    for tile_row, column, lane, index in np.ndindex(words.shape):
        row, block = tile_row * 16 + lane // 4 + index % 2 * 8, column * 2 + index // 2
        inside = block * 32 < k
        q = nibbles[row, block, lane % 4 * 8 : lane % 4 * 8 + 8].astype(int) if inside else [8] * 8
        word = int(words[tile_row, column, lane, index])
        for pair in range(4):
            found = (word >> 4 * pair) & 0x000F000F
            assert (found & 0xFFFF, found >> 16) == (q[2 * pair], q[2 * pair + 1])
        assert scales[tile_row, column, lane // 4, index] == (d[row, block] if inside else 0)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_twins_fill_the_tiles_and_read_them_back(n: int, k: int) -> None:
    values = np.random.default_rng(3).standard_normal((n, k)).astype(ml_dtypes.bfloat16)
    rows = quantise(values.astype(np.float32))
    wanted = twin.pack(rows)
    grid = (1, n // 16, 1)
    for make, source in ((twin.q4_quantise, values), (twin.q4_repack, rows.data)):
        quants, scales = on_host(n, k)
        make(grid, [], source.ctypes.data, quants.ctypes.data, scales.ctypes.data, k)
        np.testing.assert_array_equal(quants, wanted[0])
        np.testing.assert_array_equal(scales, wanted[1])
    out = np.full((n, k), np.nan, ml_dtypes.bfloat16)
    twin.q4_dequantise(grid, [], quants.ctypes.data, scales.ctypes.data, out.ctypes.data, k)
    assert np.abs(out.astype(np.float32) - values.astype(np.float32)).max() < 0.4


def test_rows_of_tiles_are_a_view() -> None:
    whole = tiles(64, 96)
    part = whole.rows(16, 48)
    assert (part.n, part.k) == (32, 96)
    assert part.quants == Tensor(4096 + 2 * 512, (2, 2, 512), DType.U8)
    assert part.scales == Tensor(4096 + 2 * 64, (2, 2, 8, 4), DType.F16)
    assert whole.bytes == 64 * 128 // 2 + 4 * 2 * 64
    with pytest.raises(ValueError, match="multiples of 16 only"):
        whole.rows(8, 24)
    with pytest.raises(ValueError, match="rows 2 … 5 of a tensor with 4"):
        whole.rows(32, 80)
    with pytest.raises(ValueError, match="n must be a multiple of 16, k of 32"):
        tile_shapes(24, 64)


def test_wrong_shapes_are_refused() -> None:
    values = Tensor(4096, (64, 64), DType.BF16)
    with pytest.raises(ValueError, match=r"values must be bf16 \[64, 96\]"):
        q4_quantise(NO_LIBRARY, values=values, tiles=tiles(64, 96))
    with pytest.raises(ValueError, match=r"raw must be u8 \[64, 54\]"):
        q4_repack(NO_LIBRARY, raw=Tensor(4096, (64, 52), DType.U8), tiles=tiles(64, 96))
    with pytest.raises(ValueError, match=r"out must be bf16 \[64, 96\]"):
        q4_dequantise(NO_LIBRARY, tiles=tiles(64, 96), out=values)
    x, y = Tensor(4096, (4, 96), DType.BF16), Tensor(4096, (4, 64), DType.BF16)
    with pytest.raises(ValueError, match="a weight of 48 rows cannot give bf16"):
        q4_gemm(NO_LIBRARY, H200, x=x, weight=tiles(48, 96), y=y)
    with pytest.raises(ValueError, match=r"x must be bf16 \[4, 96\]"):
        q4_gemm(NO_LIBRARY, H200, x=values, weight=tiles(64, 96), y=y)


@pytest.mark.parametrize("finish", list(Finish))
@pytest.mark.parametrize(
    ("n", "k"), [(16, 32), (2048, 6144), (4096, 2048), (4096, 12288), (151936, 4096), (8192, 28672)]
)
@pytest.mark.parametrize("rows", [1, 8, 16, 17, 64, 65, 512])
def test_every_product_has_a_plan(rows: int, n: int, k: int, finish: Finish) -> None:
    plan = pick_plan(H200, rows, n, k, finish)
    assert plan.variant in VARIANTS
    assert plan.variant.columns >= min(rows, SLAB)
    assert 1 <= plan.cluster <= min(MAX_CLUSTER, -(-k // 64))
    assert pick_plan(A100, rows, n, k, finish).cluster == 1


@pytest.mark.parametrize(
    ("rows", "n", "k", "finish", "warps", "cluster"),
    [
        (64, 4096, 2048, Finish.STORE, 8, 6),
        (64, 2048, 2048, Finish.ADD, 8, 6),
        (64, 6144, 2048, Finish.SWIGLU, 8, 2),
        (64, 2048, 6144, Finish.ADD, 8, 6),
        (64, 151936, 2048, Finish.STORE, 8, 1),
        (64, 6144, 4096, Finish.STORE, 8, 4),
        (64, 12288, 4096, Finish.SWIGLU, 8, 2),
        (32, 4096, 2048, Finish.STORE, 4, 4),
        (32, 2048, 2048, Finish.ADD, 4, 8),
        (16, 4096, 2048, Finish.STORE, 4, 4),
        (16, 2048, 6144, Finish.ADD, 4, 8),
        (16, 6144, 4096, Finish.STORE, 8, 6),
        (16, 4096, 12288, Finish.ADD, 8, 8),
        (16, 12288, 4096, Finish.SWIGLU, 8, 2),
    ],
)
def test_plans_are_those_that_won(
    rows: int, n: int, k: int, finish: Finish, warps: int, cluster: int
) -> None:
    plan = pick_plan(H200, rows, n, k, finish)
    assert (plan.variant.warps, plan.cluster) == (warps, cluster)


def test_wide_batches_are_left_to_cublaslt() -> None:
    assert fits(H200, 64, 2048, 2048)
    assert not fits(H200, 65, 2048, 2048)
    assert fits(H200, 128, 12288, 2048)
    assert not fits(H200, 129, 12288, 2048)
    assert not fits(A100, 16, 12288, 2048)
