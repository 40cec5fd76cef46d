"""Which kernel streams a bf16 product of several rows, and how launches divide the work, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.device import DeviceLimits
from kernels.fused import Finish
from kernels.skinny_rows import LEAST_BYTES, MAX_ROWS, MOST_BATCH, UNITS, VARIANTS, pick_rows
from kernels.tensor import DType

H200 = DeviceLimits((9, 0), 132, 232448, 62914560)
A100 = DeviceLimits((8, 0), 108, 166912, 41943040)
B200 = DeviceLimits((10, 0), 148, 232448, 132644864)


def test_each_kernel_is_compiled_once() -> None:
    assert len({unit.name for unit in UNITS}) == len(UNITS) == len(VARIANTS)


@pytest.mark.parametrize(("n", "k"), [(4096, 2048), (2048, 2048), (6144, 2048), (4096, 4096), (8208, 544)])
@pytest.mark.parametrize("finish", list(Finish))
@pytest.mark.parametrize("rows", range(2, MAX_ROWS + 1))
def test_hopper_streams_every_row_once(rows: int, n: int, k: int, finish: Finish) -> None:
    variant = pick_rows(H200, rows, n, k, DType.BF16, finish)
    assert variant is not None
    assert variant.finish is finish
    assert k <= variant.shape.most_k
    split = variant.split(H200, rows, n, k)
    assert split.blocks * split.each + split.extra == n // 16
    assert 0 <= split.extra < split.blocks
    assert rows <= 1 << split.shift <= MAX_ROWS
    most = split.each + (split.extra > 0)
    assert 1 <= split.batch <= min(most, MOST_BATCH)
    assert split.batch * 16 << split.shift <= 32 * variant.shape.warps
    assert 1 <= split.stages <= variant.shape.stages
    assert variant.shared_bytes(split) <= H200.shared_bytes_per_block


def test_blocks_side_by_side_fit_in_a_multiprocessor() -> None:
    """In its 228 KB, 1 KB of each being the driver's."""
    together = [variant for variant in VARIANTS if variant.shape.spread == 2]
    assert together
    for variant in together:
        for rows in (2, MAX_ROWS):
            split = variant.split(H200, rows, 24576, variant.shape.most_k)
            assert 2 * (variant.shared_bytes(split) + 1024) <= 228 << 10


def test_a_long_k_has_a_kernel_only_with_the_residual_add() -> None:
    assert pick_rows(H200, 8, 2048, 6144, DType.BF16, Finish.ADD) is not None
    assert pick_rows(H200, 8, 2048, 6144, DType.BF16, Finish.STORE) is None
    assert pick_rows(H200, 8, 2048, 6176, DType.BF16, Finish.ADD) is None


def test_sums_give_way_where_ring_and_sums_do_not_fit() -> None:
    """More groups than blocks: two batches of two groups of 8 rows would be 3168 B too many."""
    variant = pick_rows(H200, 8, 2560, 6144, DType.BF16, Finish.ADD)
    assert variant is not None
    for rows, batch in ((4, 2), (8, 1)):
        split = variant.split(H200, rows, 2560, 6144)
        assert (split.stages, split.batch) == (variant.shape.stages, batch)
        assert variant.shared_bytes(split) <= H200.shared_bytes_per_block


def test_others_do_not_stream() -> None:
    for limits in (A100, B200, replace(H200, shared_bytes_per_block=48 << 10)):
        assert pick_rows(limits, 8, 4096, 2048, DType.BF16, Finish.STORE) is None
    for rows in (1, MAX_ROWS + 1):
        assert pick_rows(H200, rows, 4096, 2048, DType.BF16, Finish.STORE) is None
    assert pick_rows(H200, 8, 4096, 2048, DType.F32, Finish.STORE) is None


def test_small_weights_do_not_stream() -> None:
    assert LEAST_BYTES == 2 * 2048 * 2048
    assert pick_rows(H200, 8, 2048, 2048, DType.BF16, Finish.ADD) is not None
    assert pick_rows(H200, 8, 2032, 2048, DType.BF16, Finish.ADD) is None
    assert pick_rows(H200, 8, 1024, 2048, DType.BF16, Finish.SWIGLU) is not None
