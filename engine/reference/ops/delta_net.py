"""Gated DeltaNet: causal convolution, the recurrence as steps and in chunks. Knows no layer and no slot.

Per value head and token, with state S [key_head_dim, value_head_dim]:
S ← exp(g)·S;  δ = β·(v − kᵀS);  S ← S + k·δᵀ;  o = qᵀS.
The chunked form computes the same for up to CHUNK tokens by matrix products: Yang et al., "Gated Delta
Networks: Improving Mamba2 with Delta Rule", 2024.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.reference.arrays import FloatArray
from engine.reference.ops.activation import softplus

CHUNK = 64
"""Tokens of one chunk."""

Doubles = NDArray[np.float64]


def causal_conv(x: FloatArray, state: FloatArray, weight: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Depthwise convolution over tokens: x float32 [n, channels], weight [channels, kernel].

    `state` [kernel − 1, channels] holds the tokens before. Returns the result [n, channels], before any
    activation, and the state after.
    """
    rows, kernel = len(x), weight.shape[1]
    extended = np.concatenate([state, x])
    out = extended[:rows] * weight[:, 0]
    for tap in range(1, kernel):
        out += extended[tap : tap + rows] * weight[:, tap]
    return out, extended[rows:]


def decay_log(a: FloatArray, a_log: FloatArray, dt_bias: FloatArray) -> FloatArray:
    """g = −exp(a_log) · softplus(a + dt_bias), float32 [..., value heads]; exp(g) is the decay."""
    decay: FloatArray = -np.exp(a_log) * softplus(a + dt_bias)
    return decay


def delta_step(
    q: FloatArray, k: FloatArray, v: FloatArray, g: FloatArray, beta: FloatArray, state: FloatArray
) -> FloatArray:
    """One token of each of several sequences.

    q and k are [sequences, heads, key_head_dim], normalised and q scaled; v [sequences, heads,
    value_head_dim]; g and beta [sequences, heads]; state [sequences, heads, key_head_dim,
    value_head_dim], changed in place. Returns o [sequences, heads, value_head_dim].
    """
    state *= np.exp(g)[..., None, None]
    recalled = np.matmul(k[..., None, :], state)[..., 0, :]
    delta = (v - recalled) * beta[..., None]
    state += k[..., :, None] * delta[..., None, :]
    out: FloatArray = np.matmul(q[..., None, :], state)[..., 0, :]
    return out


def delta_chunk(
    q: FloatArray, k: FloatArray, v: FloatArray, g: FloatArray, beta: FloatArray, state: FloatArray
) -> FloatArray:
    """Up to CHUNK consecutive tokens of one sequence.

    q and k are [heads, n, key_head_dim], normalised and q scaled; v [heads, n, value_head_dim]; g and
    beta [heads, n]; state [heads, key_head_dim, value_head_dim], changed in place. Returns float32
    [heads, n, value_head_dim].

    The inside is float64: the triangular system loses digits to cancellation, and in float32 the two
    forms came as far apart as 1e-5 of the largest logit of three-layer models, in float64 2e-6.
    """
    doubles = (x.astype(np.float64) for x in (q, k, v, g, beta, state))
    out, state[...] = _chunk(*doubles)
    return out.astype(np.float32)


def _chunk(
    q: Doubles, k: Doubles, v: Doubles, g: Doubles, beta: Doubles, state: Doubles
) -> tuple[Doubles, Doubles]:
    """o and the state after."""
    reach = np.cumsum(g, axis=-1)
    decay = np.exp(np.tril(reach[:, :, None] - reach[:, None, :]))
    weighted_keys = k * beta[..., None]
    interaction = np.tril(np.matmul(weighted_keys, k.swapaxes(1, 2)) * decay, -1)
    solved = _solve_unit_lower(
        interaction,
        np.concatenate([v * beta[..., None], weighted_keys * np.exp(reach)[..., None]], axis=-1),
    )
    fresh, carried = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    delta = fresh - np.matmul(carried, state)
    within = np.tril(np.matmul(q, k.swapaxes(1, 2)) * decay)
    out: Doubles = np.matmul(q * np.exp(reach)[..., None], state) + np.matmul(within, delta)
    last = reach[:, -1:]
    kept = k * np.exp(last - reach)[..., None]
    return out, state * np.exp(last)[..., None] + np.matmul(kept.swapaxes(1, 2), delta)


def _solve_unit_lower(strictly_lower: Doubles, right: Doubles) -> Doubles:
    """x of (I + L)·x = right by forward substitution: L [heads, n, n], right [heads, n, columns]."""
    solved = right.copy()
    for row in range(1, right.shape[1]):
        solved[:, row] -= np.matmul(strictly_lower[:, row, None, :row], solved[:, :row])[:, 0]
    return solved
