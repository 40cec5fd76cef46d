"""Routing against plain softmax and sort, and its rounding."""

from __future__ import annotations

import numpy as np
import pytest

from engine.reference.ops.moe import round_bfloat16, route_top_k, rows_by_expert


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1, 4, 1), (7, 16, 4), (65, 128, 8), (3, 5, 5)])
def test_route(rows: int, experts: int, top_k: int, normalise: bool) -> None:
    logits = np.random.default_rng(experts).standard_normal((rows, experts), dtype=np.float32) * 3
    chosen, weights = route_top_k(logits, top_k, normalise=normalise)
    exact = np.exp(logits.astype(np.float64))
    exact /= exact.sum(axis=1, keepdims=True)
    for row in range(rows):
        order = sorted(range(experts), key=lambda i: -exact[row, i])[:top_k]
        assert chosen[row].tolist() == order
        wanted = exact[row, order] / (exact[row, order].sum() if normalise else 1.0)
        np.testing.assert_allclose(weights[row], wanted, rtol=1e-5)


def test_ties_go_to_the_lower_expert() -> None:
    chosen, weights = route_top_k(np.zeros((2, 6), np.float32), 3, normalise=True)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(weights, 1 / 3, rtol=1e-6)


def test_rows_by_expert_lists_every_pair_once() -> None:
    experts = np.array([[3, 0], [0, 5], [3, 5], [0, 3]], np.int32)
    listed = {
        expert: list(zip(rows, places, strict=True)) for expert, rows, places in rows_by_expert(experts)
    }
    assert listed == {0: [(0, 1), (1, 0), (3, 0)], 3: [(0, 0), (2, 0), (3, 1)], 5: [(1, 1), (2, 1)]}
    assert list(listed) == [0, 3, 5]


def test_bfloat16_rounds_to_nearest_even() -> None:
    x = np.array([1.0, 1 + 2**-9, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-7], np.float32)
    assert round_bfloat16(x).tolist() == [1.0, 1.0, 1.0, 1 + 2**-6, -1 - 2**-7]
