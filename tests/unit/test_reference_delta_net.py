"""DeltaNet's convolution, step and chunk against the recurrence written out token by token in float64."""

from __future__ import annotations

import numpy as np
import pytest

from engine.reference.ops.delta_net import CHUNK, causal_conv, decay_log, delta_chunk, delta_step
from engine.reference.ops.norm import l2_norm

HEADS, KEY_DIM, VALUE_DIM = 3, 16, 24


def inputs(rows: int) -> tuple[np.ndarray, ...]:
    """q, k, v, g, beta for one sequence, heads first."""
    random = np.random.default_rng(rows)
    q, k = l2_norm(random.standard_normal((2, HEADS, rows, KEY_DIM), dtype=np.float32))
    v = random.standard_normal((HEADS, rows, VALUE_DIM), dtype=np.float32)
    g = -np.exp(random.uniform(-6, 2, (HEADS, rows))).astype(np.float32)
    beta = random.uniform(0, 1, (HEADS, rows)).astype(np.float32)
    return q * np.float32(KEY_DIM**-0.5), k, v, g, beta


def start_state() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((HEADS, KEY_DIM, VALUE_DIM), dtype=np.float32)


def by_definition(parts: tuple[np.ndarray, ...], state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    q, k, v, g, beta = (part.astype(np.float64) for part in parts)
    state = state.astype(np.float64)
    out = np.empty(v.shape)
    for head in range(HEADS):
        memory = state[head]
        for t in range(q.shape[1]):
            memory *= np.exp(g[head, t])
            delta = beta[head, t] * (v[head, t] - k[head, t] @ memory)
            memory += np.outer(k[head, t], delta)
            out[head, t] = q[head, t] @ memory
    return out, state


@pytest.mark.parametrize("rows", [1, 2, 3, 31, 63, CHUNK])
def test_chunk(rows: int) -> None:
    parts, state = inputs(rows), start_state()
    wanted, wanted_state = by_definition(parts, state)
    out = delta_chunk(*parts, state)
    np.testing.assert_allclose(out, wanted, atol=2e-6)
    np.testing.assert_allclose(state, wanted_state, atol=2e-6)


@pytest.mark.parametrize("cut", [1, 17, 63])
def test_state_is_carried_over_any_border(cut: int) -> None:
    parts, state = inputs(CHUNK), start_state()
    wanted, wanted_state = by_definition(parts, state)
    first = delta_chunk(*(part[:, :cut] for part in parts), state)
    second = delta_chunk(*(part[:, cut:] for part in parts), state)
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), wanted, atol=2e-6)
    np.testing.assert_allclose(state, wanted_state, atol=2e-6)


def test_step_form_of_several_sequences() -> None:
    """Each sequence is at another place of the same inputs; none disturbs the others."""
    parts = inputs(20)
    by_sequence = [parts, tuple(part[:, ::-1] for part in parts)]
    states = np.stack([start_state(), np.zeros_like(start_state())])
    wanted = [by_definition(one, state) for one, state in zip(by_sequence, states, strict=True)]
    for t in range(20):
        q, k, v, g, beta = (np.stack([one[i][:, t] for one in by_sequence]) for i in range(5))
        out = delta_step(q, k, v, g, beta, states)
        for sequence in range(2):
            np.testing.assert_allclose(out[sequence], wanted[sequence][0][:, t], atol=5e-6)
    for sequence in range(2):
        np.testing.assert_allclose(states[sequence], wanted[sequence][1], atol=5e-6)


def test_convolution_sees_its_past_and_only_that() -> None:
    random = np.random.default_rng(3)
    x, weight = (
        random.standard_normal((11, 6), dtype=np.float32),
        random.standard_normal((6, 4), dtype=np.float32),
    )
    past = random.standard_normal((3, 6), dtype=np.float32)
    extended = np.concatenate([past, x]).astype(np.float64)
    wanted = np.stack([(extended[t : t + 4] * weight.T).sum(axis=0) for t in range(11)])
    out, after = causal_conv(x, past, weight)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    assert np.array_equal(after, x[-3:])
    for cut in range(1, 11):
        first, state = causal_conv(x[:cut], past, weight)
        second, state = causal_conv(x[cut:], state, weight)
        assert np.array_equal(np.concatenate([first, second]), out)
        assert np.array_equal(state, after)


def test_decay() -> None:
    a, a_log, bias = (
        np.array([[-30, 0, 30]], np.float32),
        np.array([0, 1, 2], np.float32),
        np.float32([1, 2, 3]),
    )
    exact = a.astype(np.float64) + bias
    wanted = -np.exp(a_log.astype(np.float64)) * np.logaddexp(0, exact)
    np.testing.assert_allclose(decay_log(a, a_log, bias), wanted, rtol=1e-6)
