"""Which kernel a product of few rows gets on which device, and what is refused, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.device import DeviceLimits
from kernels.fp8 import Fp8Rows
from kernels.q4 import Q4Tiles
from kernels.skinny import (
    UNITS,
    VARIANTS,
    Finish,
    FusedNorm,
    Weight,
    WeightKind,
    fits,
    kind_of,
    pick_variant,
    skinny_product,
)
from kernels.tensor import DType, Tensor

H200 = DeviceLimits((9, 0), 132, 232448, 62914560)
RTX_3090 = DeviceLimits((8, 6), 82, 101376, 6291456)
NO_LIBRARY: Any = None
"""Shapes are checked before the library is asked for anything."""
BF16_WEIGHT = Tensor(4096, (96, 64), DType.BF16)


@pytest.mark.parametrize("limits", [H200, RTX_3090], ids=["h200", "rtx3090"])
@pytest.mark.parametrize("kind", list(WeightKind))
@pytest.mark.parametrize(("hidden", "intermediate", "vocab"), [(576, 1536, 49152), (4096, 14336, 128256)])
def test_every_product_of_a_model_has_a_kernel_that_fits(
    limits: DeviceLimits, kind: WeightKind, hidden: int, intermediate: int, vocab: int
) -> None:
    products = (
        (hidden, hidden, DType.BF16, Finish.ADD),
        (hidden, intermediate, DType.BF16, Finish.ADD),
        (3 * hidden, hidden, DType.BF16, Finish.STORE),
        (vocab, hidden, DType.F32, Finish.STORE),
        (2 * intermediate, hidden, DType.BF16, Finish.SWIGLU),
    )
    for rows in (1, 2, 8) if kind.max_rows > 1 else (1,):
        for n, k, out, finish in products:
            norm = rows == 1 and finish is not Finish.ADD and out is DType.BF16
            variant = pick_variant(limits, rows, n, k, out, finish, norm, kind)
            assert variant.shared_bytes(rows, k) <= limits.shared_bytes_per_block
            assert variant in VARIANTS


def test_a_kernel_is_compiled_once() -> None:
    assert {unit.expressions for unit in UNITS} == {(variant.expression,) for variant in VARIANTS}
    assert len({unit.expressions for unit in UNITS}) == len(UNITS)


def test_blocks_stay_where_a_ring_says_how_many() -> None:
    variant = pick_variant(H200, 1, 4096, 2048, DType.BF16, Finish.ADD, False, WeightKind.Q4)
    assert (variant.ring.spread, variant.blocks(H200, 4096), variant.blocks(H200, 64)) == (1, 132, 4)


@pytest.mark.parametrize(
    ("rows", "out", "finish", "norm"),
    [
        (2, DType.BF16, Finish.STORE, True),
        (1, DType.F32, Finish.ADD, False),
        (1, DType.BF16, Finish.ADD, True),
        (1, DType.F32, Finish.STORE, True),
    ],
)
def test_what_no_kernel_does_is_refused(rows: int, out: DType, finish: Finish, norm: bool) -> None:
    with pytest.raises(ValueError, match=f"no kernel for {rows} rows of 64, {finish.name} into {out.value}"):
        pick_variant(H200, rows, 96, 64, out, finish, norm)


@pytest.mark.parametrize(("rows", "n", "k"), [(9, 96, 64), (1, 100, 64), (1, 96, 48)])
def test_shapes_that_do_not_fit_are_refused(rows: int, n: int, k: int) -> None:
    assert not fits(rows, n, k, kind=WeightKind.Q4)
    x, y = Tensor(4096, (rows, k), DType.BF16), Tensor(4096, (rows, n), DType.BF16)
    with pytest.raises(ValueError, match=f"no kernel for {rows} × {n} × {k}"):
        skinny_product(NO_LIBRARY, H200, x=x, weight=BF16_WEIGHT, y=y)


def test_wide_bf16_weights_go_elsewhere_and_others_stay() -> None:
    assert fits(1, 4096, 4096)
    assert not fits(1, 4096, 14336)
    assert fits(1, 4096, 14336, kind=WeightKind.FP8)
    assert not fits(2, 4096, 14336, kind=WeightKind.FP8)
    assert fits(8, 4096, 14336, kind=WeightKind.Q4)


@pytest.mark.parametrize(
    ("weight", "kind", "message"),
    [
        (BF16_WEIGHT, WeightKind.BF16, r"weight must be bf16 \[128, 64\]"),
        (
            Fp8Rows(Tensor(4096, (128, 64), DType.E4M3), Tensor(4096, (64,), DType.F32)),
            WeightKind.FP8,
            r"weight.scale must be f32 \[128\]",
        ),
        (
            Q4Tiles(Tensor(4096, (8, 1, 512), DType.U8), Tensor(4096, (8, 1, 4, 4), DType.F16), n=128, k=64),
            WeightKind.Q4,
            r"weight.scales must be f16 \[8, 1, 8, 4\]",
        ),
    ],
    ids=list(WeightKind),
)
def test_a_weight_of_another_shape_is_refused(weight: Weight, kind: WeightKind, message: str) -> None:
    assert kind_of(weight) is kind
    x, y = Tensor(4096, (1, 64), DType.BF16), Tensor(4096, (1, 64), DType.BF16)
    norm = FusedNorm(Tensor(4096, (64,), DType.BF16), 1e-6)
    with pytest.raises(ValueError, match=message):
        skinny_product(NO_LIBRARY, H200, x=x, weight=weight, y=y, finish=Finish.SWIGLU, norm=norm)
