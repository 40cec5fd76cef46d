"""Element-wise, norm, rope, embedding and linear operations against float64 formulas, at awkward shapes."""

from __future__ import annotations

import numpy as np
import pytest

from engine.config import RopeKind, RopeSpec
from engine.reference.ops.activation import (
    gelu_tanh_mul,
    sigmoid,
    silu,
    silu_mul,
    softcap,
    softplus,
)
from engine.reference.ops.embedding import embed
from engine.reference.ops.kv_pages import scrub_pages, write_kv_pages
from engine.reference.ops.linear import BLOCK_ROWS, linear
from engine.reference.ops.norm import gated_rms_norm, l2_norm, rms_norm
from engine.reference.ops.rope import rope, rope_cos_sin

RNG = np.random.default_rng(7)
SHAPES = [(1, 1), (1, 576), (3, 65), (8, 128), (17, 33), (2, 5, 64)]


def random(*shape: int) -> np.ndarray:
    """Values over several orders of magnitude, both signs."""
    return (RNG.standard_normal(shape) * np.exp(RNG.uniform(-3, 3, shape))).astype(np.float32)


def close(actual: np.ndarray, wanted: np.ndarray, tolerance: float = 2e-6) -> None:
    """Compares to a float64 result, relative to its largest value; names the first bad coordinate."""
    assert actual.dtype == np.float32
    assert actual.shape == wanted.shape
    error = np.abs(actual.astype(np.float64) - wanted)
    bad = np.argwhere(~(error <= tolerance * max(1e-30, float(np.max(np.abs(wanted))))))
    assert len(bad) == 0, f"{len(bad)} bad, first at {bad[0]}"


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = random(*shape), random(shape[-1])
    exact = x.astype(np.float64)
    normed = exact / np.sqrt(np.mean(exact**2, axis=-1, keepdims=True) + 1e-5)
    close(rms_norm(x, weight, 1e-5), normed * weight)
    close(rms_norm(x, None, 1e-5), normed)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert not rms_norm(np.zeros((2, 8), np.float32), None, 1e-6).any()


def test_rms_norm_takes_a_weight_per_head() -> None:
    x, weight = random(4, 3, 16), random(3, 16)
    exact = x.astype(np.float64)
    wanted = exact / np.sqrt(np.mean(exact**2, axis=-1, keepdims=True) + 1e-6) * weight
    close(rms_norm(x, weight, 1e-6), wanted)


def test_l2_and_gated_norms() -> None:
    x, gate, weight = random(5, 3, 24), random(5, 3, 24), random(24)
    exact, exact_gate = x.astype(np.float64), gate.astype(np.float64)
    close(l2_norm(x), exact / np.sqrt(np.sum(exact**2, axis=-1, keepdims=True) + 1e-6))
    normed = exact / np.sqrt(np.mean(exact**2, axis=-1, keepdims=True) + 1e-6) * weight
    close(gated_rms_norm(x, gate, weight, 1e-6), normed * exact_gate / (1 + np.exp(-exact_gate)))


@pytest.mark.filterwarnings("ignore:overflow")
def test_activations_over_the_whole_range() -> None:
    x = np.concatenate([random(1000), [-1e4, -100, -88.8, 0, 1e-30, 88.8, 1e4]]).astype(np.float32)
    exact = x.astype(np.float64)
    with np.errstate(over="ignore"):
        logistic = 1 / (1 + np.exp(-exact))
        soft = np.where(exact > 30, exact, np.log1p(np.exp(np.minimum(exact, 30))))
    np.testing.assert_allclose(sigmoid(x), logistic, rtol=1e-5, atol=1e-37)
    np.testing.assert_allclose(silu(x), exact * logistic, rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(softplus(x), soft, rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(softcap(x.copy(), 30.0), 30 * np.tanh(exact / 30), rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_gated_products(rows: int) -> None:
    gate_up = random(rows, 2 * 33)
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    close(silu_mul(gate_up), gate / (1 + np.exp(-gate)) * up)
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    close(gelu_tanh_mul(gate_up), 0.5 * gate * (1 + np.tanh(inner)) * up)


@pytest.mark.parametrize("rows", [1, 8, 16, 17, 100, BLOCK_ROWS, BLOCK_ROWS + 1, 2 * BLOCK_ROWS + 8])
def test_linear(rows: int) -> None:
    x, weight, bias = random(rows, 65), random(37, 65), random(37)
    wanted = x.astype(np.float64) @ weight.astype(np.float64).T
    close(linear(x, weight), wanted)
    close(linear(x, weight, bias), wanted + bias)


def test_embedding_scales() -> None:
    table, tokens = random(50, 16), np.array([0, 49, 7, 7], np.int32)
    assert np.array_equal(embed(tokens, table), table[[0, 49, 7, 7]])
    close(embed(tokens, table, 73.5), table[[0, 49, 7, 7]].astype(np.float64) * 73.5)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (64, 16), (32, 32), (256, 64)])
def test_rope(head_dim: int, rotary_dim: int) -> None:
    spec = RopeSpec(RopeKind.DEFAULT, 1e4, head_dim, rotary_dim)
    positions = np.array([0, 1, 63, 64, 8191, 100_000], np.int32)
    x = random(len(positions), 3, head_dim)
    frequencies = spec.inverse_frequencies()
    turned = x.copy()
    rope(turned, *rope_cos_sin(positions, frequencies, 1.25))
    angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)[:, None, :]
    rotation = 1.25 * np.exp(1j * angles)
    half = rotary_dim // 2
    complex_x = (x[..., :half] + 1j * x[..., half:rotary_dim].astype(np.float64)) * rotation
    wanted = x.astype(np.float64)
    wanted[..., :half], wanted[..., half:rotary_dim] = complex_x.real, complex_x.imag
    close(turned, wanted)
    assert np.array_equal(turned[..., rotary_dim:], x[..., rotary_dim:])


def test_kv_pages_are_written_where_told_and_nowhere_else() -> None:
    k_pages, v_pages = np.full((2, 5, 3, 64, 8), np.nan, np.float32)
    k, v = random(3, 3, 8), random(3, 3, 8)
    pages, places = np.array([4, 0, 4], np.int32), np.array([63, 0, 1], np.int32)
    write_kv_pages(k, v, k_pages, v_pages, pages, places)
    for source, target in ((k, k_pages), (v, v_pages)):
        for row in range(3):
            assert np.array_equal(target[pages[row], :, places[row]], source[row])
        assert np.count_nonzero(~np.isnan(target)) == source.size


def test_scrubbing_touches_only_what_is_not_finite() -> None:
    pages = random(4, 2, 64, 8)
    pages[1, 0, 3, :3] = [np.nan, np.inf, -np.inf]
    pages[3, 0, 0, 0] = np.nan
    before = pages.copy()
    scrub_pages(pages, np.array([0, 1], np.int32))
    assert np.array_equal(pages[1, 0, 3, :3], [0, 0, 0])
    before[1, 0, 3, :3] = 0
    assert np.array_equal(pages, before, equal_nan=True)
