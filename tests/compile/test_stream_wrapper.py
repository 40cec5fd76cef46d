"""Which kernel streams one row's product, and how launches divide the work, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.device import DeviceLimits
from kernels.fused import Finish
from kernels.skinny_stream import FEW_PIECES, MOST_BATCH, UNITS, VARIANTS, pick_stream
from kernels.tensor import DType

H200 = DeviceLimits((9, 0), 132, 232448, 62914560)
A100 = DeviceLimits((8, 0), 108, 166912, 41943040)
B200 = DeviceLimits((10, 0), 148, 232448, 132644864)
SHAPES = (
    *((16, 32), (576, 576), (2048, 2048), (2048, 6144), (4096, 4096), (4096, 14336), (6144, 2048)),
    *((14336, 4096), (28672, 8192), (151936, 2048), (128256, 4096)),
)


def test_each_kernel_is_compiled_once() -> None:
    assert len({unit.name for unit in UNITS}) == len(UNITS) == len(VARIANTS)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("finish", list(Finish))
@pytest.mark.parametrize("norm", [False, True])
def test_hopper_streams_every_row_once(n: int, k: int, finish: Finish, norm: bool) -> None:
    if norm and finish is Finish.ADD:
        assert pick_stream(H200, n, k, DType.BF16, finish, norm) is None
        return
    variant = pick_stream(H200, n, k, DType.BF16, finish, norm)
    assert variant is not None
    assert k <= variant.shape.most_k
    split = variant.split(H200, n, k)
    assert split.blocks * split.each + split.extra == n // 16
    assert 0 <= split.extra < split.blocks
    most = split.each + (split.extra > 0)
    assert 1 <= split.batch <= min(most, MOST_BATCH, 2 * variant.shape.warps)
    assert split.stages >= 1
    assert variant.shared_bytes(split) <= H200.shared_bytes_per_block


def test_a_block_of_little_work_leaves_room_for_the_next() -> None:
    """Two of them fit in a multiprocessor's 228 KB, 1 KB of each being the driver's."""
    for n, k, finish in ((6144, 4096, Finish.STORE), (4096, 4096, Finish.ADD), (2048, 6144, Finish.ADD)):
        variant = pick_stream(H200, n, k, DType.BF16, finish, norm=False)
        assert variant is not None
        split = variant.split(H200, n, k)
        assert split.stages <= FEW_PIECES
        assert 2 * (variant.shared_bytes(split) + 1024) <= 228 << 10


def test_others_do_not_stream() -> None:
    for limits in (A100, B200, replace(H200, shared_bytes_per_block=48 << 10)):
        assert pick_stream(limits, 14336, 4096, DType.BF16, Finish.SWIGLU, norm=True) is None
    assert pick_stream(H200, 2048, 14368, DType.BF16, Finish.ADD, norm=False) is None
    assert pick_stream(H200, 2048, 2048, DType.F32, Finish.ADD, norm=False) is None
