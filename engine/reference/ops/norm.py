"""RMS normalisations over the last axis, accumulated in float32. Knows no layer."""

from __future__ import annotations

import numpy as np

from engine.reference.arrays import FloatArray
from engine.reference.ops.activation import silu


def rms_norm(x: FloatArray, weight: FloatArray | None, eps: float) -> FloatArray:
    """x / sqrt(mean(x²) + eps) · weight, float32 [..., n].

    `weight` is [n] or anything that broadcasts against x ([heads, n] gives each head its own), with a
    family's offset of one already added; None scales nothing.
    """
    mean_square = np.add.reduce(np.square(x), axis=-1, keepdims=True)
    mean_square /= np.float32(x.shape[-1])
    mean_square += np.float32(eps)
    np.sqrt(mean_square, out=mean_square)
    normed = np.divide(x, mean_square, dtype=np.float32)
    if weight is not None:
        normed *= weight
    return normed


def gated_rms_norm(x: FloatArray, gate: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
    """rms_norm(x) · weight · silu(gate), float32 [..., n]; the norm comes before the gate."""
    normed = rms_norm(x, weight, eps)
    normed *= silu(gate)
    return normed


def l2_norm(x: FloatArray, eps: float = 1e-6) -> FloatArray:
    """x / sqrt(sum(x²) + eps), float32 [..., n]."""
    square_sum = np.add.reduce(np.square(x), axis=-1, keepdims=True)
    square_sum += np.float32(eps)
    return np.divide(x, np.sqrt(square_sum), dtype=np.float32)
