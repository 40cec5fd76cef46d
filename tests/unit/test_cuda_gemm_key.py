"""What names a matrix product: its text, its sizes, and which products of e4m3 there can be."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("cuda.bindings")
pytest.importorskip("nvmath")

from engine.cuda.cublaslt import Product
from engine.cuda.gemm_key import Epilogue, GemmKey, fits_fp8
from engine.cuda.gemm_tuning import _FP8_SPREAD, _noise
from kernels.tensor import DType

FP8 = GemmKey(64, 4096, 2048, x=DType.E4M3, w=DType.E4M3)


def test_a_key_as_files_have_it() -> None:
    assert str(FP8) == "64×4096×2048 e4m3·e4m3→bf16 none"
    assert FP8.bytes == 4096 * 2048 + 64 * 2048 + 64 * 4096 * 2
    assert FP8.misfit is None
    assert GemmKey(64, 4096, 2048).misfit is None


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (replace(FP8, x=DType.BF16), "multiplied by e4m3 alone"),
        (replace(FP8, w=DType.BF16), "multiplied by e4m3 alone"),
        (replace(FP8, epilogue=Epilogue.ADD), "take no epilogue"),
        (replace(FP8, epilogue=Epilogue.BIAS), "take no epilogue"),
        (replace(FP8, n=4104), "multiples of 16"),
        (replace(FP8, k=2056), "multiples of 16"),
    ],
    ids=str,
)
def test_products_of_e4m3_that_cannot_be(key: GemmKey, reason: str) -> None:
    assert reason in str(key.misfit)
    with pytest.raises(ValueError, match=f"{key}: .*{reason}"):
        Product(key)


def test_few_rows_add_up_in_float32() -> None:
    assert not FP8.accumulates_fast
    assert replace(FP8, rows=256).accumulates_fast
    assert not GemmKey(256, 4096, 2048).accumulates_fast


def test_sizes_that_fit() -> None:
    assert fits_fp8(16, 16)
    assert not fits_fp8(8, 16)
    assert not fits_fp8(16, 8)


def test_operands_of_a_tuning_run_are_finite_in_e4m3() -> None:
    """What lies beyond 448 would become NaN."""
    values = _noise(_FP8_SPREAD, DType.E4M3).astype("float32")
    assert abs(values).max() == 448
    assert values.std() == pytest.approx(_FP8_SPREAD, rel=0.01)
