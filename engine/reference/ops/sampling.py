"""Choosing one token from one row of logits. Knows no slot and no sequence.

The draw is one uniform number u and the inverse of the cumulative distribution: with w_i the float32
weights exp((z_i − max z) / temperature) of the kept tokens in vocabulary order, the token is the first
whose float64 running sum exceeds u · (sum of all kept). A tie is always settled for the lower id.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from engine.reference.arrays import BoolArray, FloatArray, IntArray

_HEADS = (256, 4096)
"""Sizes of the largest-first prefix to try before the whole vocabulary is sorted for top-p."""

Ids = NDArray[np.intp]


def apply_penalties(
    logits: FloatArray,
    in_prompt: BoolArray,
    output_counts: IntArray,
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    """Changes logits [vocab] in place.

    A token of prompt or output: positive logits are divided by `repetition`, others multiplied; then a
    token of the output loses `presence` and `frequency` · its count.
    """
    if repetition != 1.0:
        seen = in_prompt | (output_counts > 0)
        factor = np.float32(repetition)
        np.divide(logits, factor, out=logits, where=seen & (logits > 0))
        np.multiply(logits, factor, out=logits, where=seen & (logits <= 0))
    if frequency != 0.0:
        logits -= output_counts.astype(np.float32) * np.float32(frequency)
    if presence != 0.0:
        logits -= (output_counts > 0).astype(np.float32) * np.float32(presence)


def apply_bias(logits: FloatArray, bias: Mapping[int, float]) -> None:
    """Adds each bias to its token's logit, in place."""
    if bias:
        logits[np.fromiter(bias.keys(), np.intp)] += np.fromiter(bias.values(), np.float32)


def greedy(logits: FloatArray) -> int:
    """The most likely token of float32 [vocab], the lowest id among equals."""
    return int(np.argmax(logits))


def sample(
    logits: FloatArray, *, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """Draws from float32 [vocab], of which at least one is finite and none is NaN or +inf.

    top_k ≤ 0, top_p ≥ 1 and min_p ≤ 0 keep every token. top-k keeps the k most likely; of those top-p
    keeps the fewest, most likely first, whose weights reach top_p of their sum; of those min-p keeps the
    ones at least min_p times as likely as the most likely.
    """
    if np.float32(temperature) == 0:
        return greedy(logits)
    scaled = logits - np.max(logits)
    scaled /= np.float32(temperature)
    weights: FloatArray = np.exp(scaled)
    kept: Ids | None = None
    if 0 < top_k < len(logits):
        kept = top_ids(scaled, top_k)
    if top_p < 1.0:
        kept = _nucleus(weights, kept, top_p)
    if min_p > 0.0:
        kept = np.arange(len(weights)) if kept is None else kept
        kept = kept[weights[kept] >= np.float32(min_p)]
    return _draw(weights, kept, uniform)


def top_ids(values: FloatArray, count: int) -> Ids:
    """Ids of the `count` largest of values [n], largest first, ties by lower id."""
    count = min(count, len(values))
    if count == 0:
        return np.empty(0, np.intp)
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    candidates = np.flatnonzero(values >= threshold)
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]


def _nucleus(weights: FloatArray, kept: Ids | None, top_p: float) -> Ids:
    """The shortest largest-first prefix of the kept tokens (None: all) that reaches top_p of their sum."""
    if kept is not None:
        return _prefix(kept, weights, top_p * float(np.sum(weights[kept], dtype=np.float64)))[0]
    goal = top_p * float(np.sum(weights, dtype=np.float64))
    for size in _HEADS:
        if size < len(weights):
            prefix, reached = _prefix(top_ids(weights, size), weights, goal)
            if reached:
                return prefix
    return _prefix(np.argsort(-weights, kind="stable"), weights, goal)[0]


def _prefix(ordered: Ids, weights: FloatArray, goal: float) -> tuple[Ids, bool]:
    """The shortest prefix of ids whose weights sum to `goal`, at least one, and whether it gets there."""
    running = np.cumsum(weights[ordered], dtype=np.float64)
    length = int(np.searchsorted(running, goal, side="left")) + 1
    return ordered[:length], length <= len(ordered)


def _draw(weights: FloatArray, kept: Ids | None, uniform: float) -> int:
    """Inverse of the cumulative distribution over the kept tokens (None: all) in vocabulary order."""
    ids = None if kept is None else np.sort(kept)
    running = np.cumsum(weights if ids is None else weights[ids], dtype=np.float64)
    place = int(np.searchsorted(running, uniform * running[-1], side="right"))
    return place if ids is None else int(ids[place])
