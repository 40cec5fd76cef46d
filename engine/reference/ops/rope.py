"""Rotary position embedding, applied. Knows no layer; where frequencies come from is engine.config's."""

from __future__ import annotations

import numpy as np

from engine.reference.arrays import FloatArray, IntArray


def rope_cos_sin(
    positions: IntArray, inverse_frequencies: FloatArray, attention_factor: float = 1.0
) -> tuple[FloatArray, FloatArray]:
    """cos and sin of position · frequency, each float32 [rows, rotary_dim / 2], times attention_factor.

    The angle is rounded to float32, as the model saw it in training; its cosine is then exact.
    """
    angles = positions.astype(np.float32)[:, None] * inverse_frequencies
    exact = angles.astype(np.float64)
    factor = np.float64(attention_factor)
    return (np.cos(exact) * factor).astype(np.float32), (np.sin(exact) * factor).astype(np.float32)


def rope(x: FloatArray, cos: FloatArray, sin: FloatArray) -> None:
    """Rotates x float32 [rows, heads, head_dim] in place; cos and sin are [rows, rotary_dim / 2].

    Dimension i < rotary_dim / 2 turns together with i + rotary_dim / 2; the rest stay.
    """
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated_first = first * cos
    rotated_first -= second * sin
    rotated_second = second * cos
    rotated_second += first * sin
    x[..., :half] = rotated_first
    x[..., half : 2 * half] = rotated_second
