"""What wrappers of FP8 kernels refuse before any launch, and which variant they pick."""

from __future__ import annotations

from typing import Any

import pytest

from kernels import activation, fp8, norm
from kernels.device import DeviceLimits
from kernels.fp8 import Fp8Rows
from kernels.tensor import DType, Tensor

H200 = DeviceLimits((9, 0), 132, 232448, 62914560)
RTX_4090 = DeviceLimits((8, 9), 128, 101376, 75497472)
NO_LIBRARY: Any = None
"""Shapes are checked before the library is asked for anything."""


def tensor(*shape: int, dtype: DType = DType.BF16, address: int = 4096) -> Tensor:
    return Tensor(address, shape, dtype)


def floats(*shape: int) -> Tensor:
    return tensor(*shape, dtype=DType.F32)


def fp8_rows(rows: int, k: int) -> Fp8Rows:
    return Fp8Rows(tensor(rows, k, dtype=DType.E4M3), floats(rows))


def test_rows_of_a_matrix_have_their_own_scales() -> None:
    part = fp8_rows(10, 64).rows(3, 5)
    assert part.shape == (2, 64)
    assert (part.values.address, part.scale.address) == (4096 + 3 * 64, 4096 + 3 * 4)
    with pytest.raises(ValueError, match="rows 3 … 11"):
        fp8_rows(10, 64).rows(3, 11)


def test_rows_that_cannot_be_quantised_are_refused() -> None:
    with pytest.raises(ValueError, match="k 20 must be a multiple of 8 and at most 32768"):
        fp8.quantise_rows(NO_LIBRARY, x=tensor(2, 20), out=fp8_rows(2, 20))
    with pytest.raises(ValueError, match="k 32776"):
        fp8.quantise_rows(NO_LIBRARY, x=tensor(2, 32776), out=fp8_rows(2, 32776))
    with pytest.raises(ValueError, match=r"x must be bf16 \[2, 64\]"):
        fp8.quantise_rows(NO_LIBRARY, x=tensor(3, 64), out=fp8_rows(2, 64))
    short = Fp8Rows(tensor(2, 64, dtype=DType.E4M3), floats(1))
    with pytest.raises(ValueError, match=r"out\.scale must be f32 \[2\], got f32 \[1\]"):
        fp8.quantise_rows(NO_LIBRARY, x=tensor(2, 64), out=short)


@pytest.mark.parametrize("given", [("delta_weight_scale",), ("delta_row_scale",)], ids=str)
def test_a_norm_takes_both_scales_of_raw_sums_or_none(given: tuple[str, ...]) -> None:
    scales = {name: floats(64 if "weight" in name else 3) for name in given}
    with pytest.raises(ValueError, match="belong together"):
        norm.add_rms_norm(
            NO_LIBRARY,
            residual=tensor(3, 64),
            delta=tensor(3, 64),
            weight=tensor(64),
            out=tensor(3, 64),
            epsilon=1e-6,
            **scales,
        )


def test_a_norms_row_scales_are_those_of_the_residuals_rows() -> None:
    with pytest.raises(ValueError, match=r"delta_row_scale must be f32 \[9\], got f32 \[3\]"):
        norm.add_rms_norm(
            NO_LIBRARY,
            residual=tensor(9, 64),
            delta=tensor(9, 64),
            delta_weight_scale=floats(64),
            delta_row_scale=floats(3),
            weight=tensor(64),
            out=tensor(3, 64),
            row_index=tensor(3, dtype=DType.I32),
            epsilon=1e-6,
        )


def test_activations_of_shapes_that_do_not_fit_are_refused() -> None:
    scales = {"weight_scale": floats(64), "row_scale": floats(2)}
    with pytest.raises(ValueError, match=r"gate_up must be bf16 \[2, 64\], got bf16 \[2, 32\]"):
        activation.gated_activation_fp8(
            NO_LIBRARY, H200, gate_up=tensor(2, 32), out=fp8_rows(2, 32), **scales
        )
    with pytest.raises(ValueError, match="weight_scale and row_scale belong together"):
        activation.gated_activation(NO_LIBRARY, gate_up=tensor(2, 64), out=tensor(2, 32), row_scale=floats(2))
    with pytest.raises(ValueError, match="inter 20 must be a multiple of 8"):
        activation.gated_activation_fp8(
            NO_LIBRARY, H200, gate_up=tensor(2, 40), out=fp8_rows(2, 20), **scales
        )
    with pytest.raises(ValueError, match="inter 32776 must be at most 32768"):
        activation.pick_variant(H200, 1, 32776)


@pytest.mark.parametrize("limits", [H200, RTX_4090], ids=["h200", "rtx4090"])
@pytest.mark.parametrize("rows", [1, 64, 128, 133, 8192])
@pytest.mark.parametrize("inter", [8, 6144, 12288, 12296, 28672, 32768])
def test_every_row_has_a_variant_that_holds_it(limits: DeviceLimits, rows: int, inter: int) -> None:
    variant = activation.pick_variant(limits, rows, inter)
    per_block = 8 * variant.chunks * variant.cluster
    threads = -(-inter // (per_block * 32)) * 32
    assert threads <= variant.threads
    assert per_block * threads >= inter
    assert variant.cluster == 1 or limits is H200
