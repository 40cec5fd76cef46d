"""Kernels that read raw FP8 sums and that quantise rows, against float64 and the reference's quantisation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from kernel_support import BF16, Gpu, assert_close, assert_untouched, random_bf16

from engine.quantization import fp8
from kernels.activation import gated_activation, gated_activation_fp8
from kernels.fp8 import Fp8Rows, quantise_rows
from kernels.norm import add_rms_norm
from kernels.tensor import DType

pytestmark = pytest.mark.gpu
ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 65, 200, 2000)
MOST_ELEMENTS = 2 << 20
"""Of a case: float64 takes its time."""
GRAIN = 1e-4
"""Relative error of a value before it is rounded to e4m3, at most."""


def rows_for(columns: int) -> list[int]:
    return [rows for rows in ROWS if rows * columns <= MOST_ELEMENTS]


def empty_rows(gpu: Gpu, rows: int, columns: int) -> Fp8Rows:
    return Fp8Rows(gpu.empty((rows, columns), DType.E4M3), gpu.empty((rows,), DType.F32))


def raw_sums(rng: np.random.Generator, rows: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As a product of e4m3 leaves them, and its scales: the values are about 1."""
    sums = random_bf16(rng, rows, n, scale=4e5)
    weight_scale = rng.uniform(1e-4, 3e-4, n).astype(np.float32)
    return sums, weight_scale, rng.uniform(0.003, 0.03, rows).astype(np.float32)


def scaled(sums: np.ndarray, weight_scale: np.ndarray, row_scale: np.ndarray) -> np.ndarray:
    return sums.astype(np.float64) * weight_scale.astype(np.float64) * row_scale.astype(np.float64)[:, None]


def assert_quantised(gpu: Gpu, got: Fp8Rows, want: np.ndarray) -> None:
    """Scales are the largest magnitude / 448; values are what float64 rounds to, or, where it stands within
    GRAIN of a boundary, the neighbour.
    """
    largest = np.abs(want).max(axis=1)
    scale = gpu.download(got.scale).astype(np.float64)
    assert_close("scale", scale, np.where(largest > 0, largest / 448, 1.0), rtol=GRAIN, atol=0)
    exact = want / scale[:, None]
    slack = np.abs(exact) * GRAIN + 1e-4
    low, high = (
        fp8.from_e4m3(fp8.to_e4m3(bound.astype(np.float32))) for bound in (exact - slack, exact + slack)
    )
    values = gpu.download(got.values).astype(np.float32)
    bad = ~((low <= values) & (values <= high))
    if bad.any():
        at = tuple(np.argwhere(bad)[0])
        raise AssertionError(f"{bad.sum()} values are wrong, first at {at}: {values[at]} for {exact[at]}")


def normalised(residual: np.ndarray, weight: np.ndarray) -> np.ndarray:
    values = residual.astype(np.float64)
    mean = np.mean(np.square(values), axis=-1, keepdims=True)
    return values / np.sqrt(mean + 1e-6) * weight.astype(np.float64)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("hidden", [64, 576, 2048, 4096, 8200, 16384])
def test_norm_adds_raw_sums(gpu: Gpu, rng: np.random.Generator, hidden: int, quantised: bool) -> None:
    for rows in rows_for(hidden):
        before = random_bf16(rng, rows, hidden, scale=3.0)
        sums, weight_scale, row_scale = raw_sums(rng, rows, hidden)
        weight, stream = random_bf16(rng, hidden), gpu.upload(before)
        out = empty_rows(gpu, rows, hidden)
        plain = gpu.empty((rows, hidden), DType.BF16)
        gpu.run(
            add_rms_norm(
                gpu.library,
                residual=stream,
                delta=gpu.upload(sums),
                delta_weight_scale=gpu.upload(weight_scale),
                delta_row_scale=gpu.upload(row_scale),
                weight=gpu.upload(weight),
                out=out.values if quantised else plain,
                scale=out.scale if quantised else None,
                epsilon=1e-6,
            )
        )
        delta = scaled(sums, weight_scale, row_scale)
        after = gpu.download(stream)
        assert_close("residual", after, before.astype(np.float64) + delta, rtol=2**-8, atol=1e-5)
        if quantised:
            assert_quantised(gpu, out, normalised(after, weight))
        else:
            assert_close("out", gpu.download(plain), normalised(after, weight), rtol=2**-8, atol=1e-6)
        gpu.release()


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("hidden", [576, 2048, 12288])
def test_norm_of_picked_rows_adds_raw_sums(
    gpu: Gpu, rng: np.random.Generator, hidden: int, quantised: bool
) -> None:
    """As the norm of all rows has them, which rounds the same sums."""
    before = random_bf16(rng, 40, hidden)
    sums, weight_scale, row_scale = raw_sums(rng, 40, hidden)
    weight, index = random_bf16(rng, hidden), rng.integers(0, 40, 17).astype(np.int32)
    stream, out, plain = gpu.upload(before), empty_rows(gpu, 17, hidden), gpu.empty((17, hidden), DType.BF16)
    arguments = {
        "delta": gpu.upload(sums),
        "delta_weight_scale": gpu.upload(weight_scale),
        "delta_row_scale": gpu.upload(row_scale),
        "weight": gpu.upload(weight),
        "epsilon": 1e-6,
    }
    gpu.run(
        add_rms_norm(
            gpu.library,
            residual=stream,
            out=out.values if quantised else plain,
            scale=out.scale if quantised else None,
            row_index=gpu.upload(index),
            **arguments,
        )
    )
    assert_close("residual", gpu.download(stream), before, rtol=0, atol=0)
    everything = gpu.empty((40, hidden), DType.BF16)
    gpu.run(add_rms_norm(gpu.library, residual=stream, out=everything, **arguments))
    after = gpu.download(stream)
    assert_close(
        "sum", after, before.astype(np.float64) + scaled(sums, weight_scale, row_scale), rtol=2**-8, atol=1e-5
    )
    want = normalised(after[index], weight)
    if quantised:
        assert_quantised(gpu, out, want)
    else:
        assert_close("out", gpu.download(plain), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("hidden", [64, 2048, 16384])
def test_norm_makes_rows_of_e4m3(gpu: Gpu, rng: np.random.Generator, hidden: int) -> None:
    for rows in rows_for(hidden):
        residual, weight = random_bf16(rng, rows, hidden), random_bf16(rng, hidden)
        residual[rows // 2] = 0
        out = empty_rows(gpu, rows, hidden)
        gpu.run(
            add_rms_norm(
                gpu.library,
                residual=gpu.upload(residual),
                weight=gpu.upload(weight),
                out=out.values,
                scale=out.scale,
                epsilon=1e-6,
            )
        )
        assert_quantised(gpu, out, normalised(residual, weight))
        gpu.release()


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("act", [silu, gelu_tanh])
@pytest.mark.parametrize("inter", [8, 264, 1048, 6144, 12288, 14336, 28672])
def test_gated_activation_of_raw_sums(
    gpu: Gpu, rng: np.random.Generator, inter: int, act: Callable[[np.ndarray], np.ndarray]
) -> None:
    for rows in rows_for(inter):
        sums, weight_scale, row_scale = raw_sums(rng, rows, 2 * inter)
        if rows > 2:
            sums[rows // 2] = 0
        operands = {
            "gate_up": gpu.upload(sums),
            "weight_scale": gpu.upload(weight_scale),
            "row_scale": gpu.upload(row_scale),
        }
        out, plain = empty_rows(gpu, rows, inter), gpu.empty((rows, inter), DType.BF16)
        kind = act.__name__
        gpu.run(
            gated_activation_fp8(gpu.library, gpu.limits, **operands, out=out, activation=kind),
            gated_activation(gpu.library, **operands, out=plain, activation=kind),
        )
        gate, up = np.split(scaled(sums, weight_scale, row_scale), 2, axis=1)
        want = act(gate) * up
        assert_quantised(gpu, out, want)
        assert_close("bf16", gpu.download(plain), want, rtol=2**-7, atol=1e-5)
        gpu.release()


def test_a_value_that_is_not_finite_stays_so(gpu: Gpu, rng: np.random.Generator) -> None:
    """So that the row's logits tell."""
    sums, weight_scale, row_scale = raw_sums(rng, 3, 2 * 264)
    sums[0, 5], sums[1, 270] = np.nan, np.inf
    out = empty_rows(gpu, 3, 264)
    gpu.run(
        gated_activation_fp8(
            gpu.library,
            gpu.limits,
            gate_up=gpu.upload(sums),
            weight_scale=gpu.upload(weight_scale),
            row_scale=gpu.upload(row_scale),
            out=out,
        )
    )
    finite = np.isfinite(gpu.download(out.values).astype(np.float32))
    assert finite.all(axis=1).tolist() == [False, False, True]


@pytest.mark.parametrize("k", [16, 576, 2048, 4096, 6144, 12288, 32768])
def test_rows_are_quantised_as_the_reference_does(gpu: Gpu, rng: np.random.Generator, k: int) -> None:
    """To the bit: weights that are quantised on the GPU are those of the reference engine."""
    for rows in rows_for(k):
        spread = np.exp(rng.standard_normal((rows, 1), np.float32) * 3) * 0.02
        x = (rng.standard_normal((rows, k), np.float32) * spread).astype(BF16)
        x[rows // 2] = 0 if rows > 2 else 1e-39
        out = empty_rows(gpu, rows, k)
        gpu.run(quantise_rows(gpu.library, x=gpu.upload(x), out=out))
        want = fp8.quantise_rows(x.astype(np.float32))
        np.testing.assert_array_equal(gpu.download(out.scale), want.scale)
        np.testing.assert_array_equal(gpu.download(out.values).view(np.uint8), want.data)
        gpu.release()


def test_some_rows_of_a_matrix_are_quantised(gpu: Gpu, rng: np.random.Generator) -> None:
    x = random_bf16(rng, 5, 576)
    whole = empty_rows(gpu, 12, 576)
    gpu.run(quantise_rows(gpu.library, x=gpu.upload(x), out=whole.rows(3, 8)))
    values, scale = gpu.download(whole.values), gpu.download(whole.scale)
    want = fp8.quantise_rows(x.astype(np.float32))
    np.testing.assert_array_equal(values[3:8].view(np.uint8), want.data)
    np.testing.assert_array_equal(scale[3:8], want.scale)
    for array in (values, scale):
        assert_untouched("other rows", array[:3])
        assert_untouched("other rows", array[8:])
