"""q4_0 bit for bit against the public gguf package, e4m3 against ml_dtypes, at the edges above all."""

from __future__ import annotations

import warnings
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from engine.quantization import Fp8Rows, Q4Rows, TensorType, apply_scale, decode
from engine.quantization.fp8 import (
    E4M3_MAX,
    dequantise_rows,
    from_e4m3,
    quantise_rows,
    to_e4m3,
)
from engine.quantization.q4_0 import dequantise, quantise

Q4_0 = gguf.GGMLQuantizationType.Q4_0
RNG = np.random.Generator(np.random.PCG64(7))


def _public_q4_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return gguf.quants.quantize(values, Q4_0)


def _spread(rows: int, columns: int) -> NDArray[np.float32]:
    """Random signs and exponents, as weights have them and beyond."""
    exponents = RNG.uniform(-30, 8, (rows, 1)).astype(np.float32)
    return (RNG.standard_normal((rows, columns)) * np.exp2(exponents)).astype(np.float32)


BLOCKS: dict[str, NDArray[np.float32]] = {
    "normal": RNG.standard_normal((17, 96)).astype(np.float32),
    "spread exponents": _spread(64, 64),
    "zero": np.zeros((2, 64), np.float32),
    "negative zero": np.full((1, 32), -0.0, np.float32),
    "one value": np.eye(32, dtype=np.float32) * np.float32(-3),
    "constant": np.full((1, 32), 0.7, np.float32),
    "huge": (RNG.standard_normal((4, 32)) * 1e38).astype(np.float32).clip(-3.4e38, 3.4e38),
    "beyond f16": (RNG.standard_normal((8, 32)) * 1e6).astype(np.float32),
    "d is an f16 subnormal": (RNG.standard_normal((8, 32)) * 1e-6).astype(np.float32),
    "d vanishes in f16": (RNG.standard_normal((8, 32)) * 1e-9).astype(np.float32),
    "float32 subnormals": (RNG.standard_normal((8, 32)) * 1e-39).astype(np.float32),
    "smallest subnormals": np.full((1, 32), 1e-45, np.float32),
    "negative maximum": np.concatenate([[-8.0], np.linspace(-7, 7, 31)]).astype(np.float32)[None],
    "positive maximum": np.concatenate([[8.0], np.linspace(-7, 7, 31)]).astype(np.float32)[None],
    "both maxima, negative first": np.array([[-4.0, 4.0] * 16], np.float32),
    "both maxima, positive first": np.array([[4.0, -4.0] * 16], np.float32),
    "halves": (np.arange(32, dtype=np.float32)[None] - 16) / 2,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_q4_0_is_bit_exact_with_the_public_package(name: str) -> None:
    values = BLOCKS[name]
    rows = quantise(values)
    expected = _public_q4_0(values)
    different = np.argwhere(rows.data != expected)
    assert rows.data.shape == expected.shape
    assert different.size == 0, f"first difference at {different[0]}"
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(dequantise(rows), gguf.quants.dequantize(expected, Q4_0))


@settings(max_examples=200, deadline=None)
@given(hnp.arrays(np.float32, (2, 32), elements=st.floats(-(2.0**120), 2.0**120, width=32)))
def test_q4_0_is_bit_exact_on_anything(values: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(quantise(values).data, _public_q4_0(values))


def test_q4_0_layout() -> None:
    """d = −8 / −8 = 1, so q = x + 8; element i sits in byte i's low nibble, i + 16 in its high one."""
    values = np.zeros((1, 32), np.float32)
    values[0, :3], values[0, 16:19] = (-8, 7, 1), (3, -2, 0)
    rows = quantise(values)
    assert rows.data.shape == (1, 18)
    assert rows.scales()[0, 0] == 1
    assert rows.data[0, 2:6].tolist() == [0 | 11 << 4, 15 | 6 << 4, 9 | 8 << 4, 8 | 8 << 4]
    np.testing.assert_array_equal(rows.nibbles()[0, 0] - 8.0, values[0])
    np.testing.assert_array_equal(dequantise(rows), values)


def test_q4_0_error_is_half_a_step_or_the_cut_at_the_far_end() -> None:
    values = RNG.standard_normal((50, 320)).astype(np.float32)
    rows = quantise(values)
    step = np.abs(rows.scales().astype(np.float32)).repeat(32, axis=1)
    assert (np.abs(dequantise(rows) - values) <= step * 1.01).all()


def test_q4_0_shape_and_refusal() -> None:
    assert quantise(np.ones((3, 64), np.float32)).shape == (3, 64)
    for shape in ((3, 33), (32,), (1, 2, 32)):
        with pytest.raises(ValueError, match="whole blocks of 32"):
            quantise(np.ones(shape, np.float32))


def test_a_files_q4_0_bytes_are_taken_as_they_are() -> None:
    data = _public_q4_0(BLOCKS["normal"])
    np.testing.assert_array_equal(dequantise(Q4Rows(data)), decode(data, TensorType.Q4_0))


# ---- e4m3


def test_e4m3_rounds_as_ml_dtypes_and_saturates() -> None:
    values = np.concatenate([_spread(64, 64).ravel(), np.linspace(-500, 500, 4001, dtype=np.float32)])
    expected = values.clip(-E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(to_e4m3(values), expected.view(np.uint8))
    edges = np.array([448, 449, 464, 465, 1e30, np.inf, -448, -1e9, -np.inf], np.float32)
    np.testing.assert_array_equal(from_e4m3(to_e4m3(edges)), [448.0] * 6 + [-448.0] * 3)
    assert np.isnan(from_e4m3(to_e4m3(np.array([np.nan], np.float32)))).all()


def test_e4m3_ties_go_to_even() -> None:
    values = np.array([1.0625, 1.1875, 17, 19, 2**-10, 3 * 2**-10], np.float32)
    np.testing.assert_array_equal(from_e4m3(to_e4m3(values)), [1.0, 1.25, 16, 20, 0, 2**-8])


def test_every_byte_decodes_as_ml_dtypes() -> None:
    every = np.arange(256, dtype=np.uint8)
    expected = every.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(from_e4m3(every), expected)


@pytest.mark.parametrize("rows", [1, 17, 33])
def test_rows_use_the_whole_range(rows: int) -> None:
    values = _spread(rows, 40)
    quantised = quantise_rows(values)
    assert quantised.scale.shape == (rows,)
    assert (np.abs(from_e4m3(quantised.data)).max(axis=1) == E4M3_MAX).all()
    largest = np.abs(values).max(axis=1, keepdims=True)
    assert (np.abs(dequantise_rows(quantised) - values) <= largest * 2**-4).all()
    expected = (values / quantised.scale[:, None]).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(quantised.data, expected.view(np.uint8))


def test_rows_of_zeros_and_of_the_smallest_numbers() -> None:
    values = np.zeros((3, 8), np.float32)
    values[1, 3] = 1e-45
    values[2] = 3e38
    quantised = quantise_rows(values)
    assert quantised.scale[0] == 1
    assert (quantised.scale > 0).all()
    assert np.isfinite(dequantise_rows(quantised)).all()
    np.testing.assert_array_equal(dequantise_rows(quantised)[0], 0)
    np.testing.assert_allclose(dequantise_rows(quantised)[2], 3e38, rtol=1e-6)


def test_scales_must_fit_their_rows() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Fp8Rows(np.zeros((3, 8), np.uint8), np.ones(8, np.float32))


# ---- types


@pytest.mark.parametrize("quantised", [t for t in TensorType if t.block_elements > 1])
def test_block_sizes_are_the_public_ones(quantised: TensorType) -> None:
    expected = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[quantised.name]]
    assert (quantised.block_elements, quantised.block_bytes) == expected
    assert quantised.row_bytes(512) == 512 // expected[0] * expected[1]
    with pytest.raises(ValueError, match="whole"):
        quantised.row_bytes(100)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (np.float32, "f32"),
        (np.float16, "f16"),
        (ml_dtypes.bfloat16, "bf16"),
        (ml_dtypes.float8_e4m3fn, "f8_e4m3"),
    ],
)
def test_plain_types_decode_exactly(dtype: Any, stored: str) -> None:
    values = RNG.standard_normal((5, 12)).astype(dtype)
    decoded = decode(values.view(np.uint8).reshape(5, -1), TensorType(stored))
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, values.astype(np.float32))


def test_block_scales_cover_a_cut_last_block() -> None:
    values = np.ones((5, 7), np.float32)
    scale = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    scaled = apply_scale(values, scale, (3, 3))
    assert scaled[:, 0].tolist() == [1, 1, 1, 4, 4]
    assert scaled[4].tolist() == [4, 4, 4, 5, 5, 5, 6]
