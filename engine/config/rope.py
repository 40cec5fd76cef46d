"""Rotary position embedding: what a layer's table is, and the frequencies in it.

Formulas are those of the public `transformers` rope utilities and of the papers behind them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class RopeKind(StrEnum):
    """How a table's frequencies come from theta; see _FORMULAS. The names are those of `rope_type`."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    PROPORTIONAL = "proportional"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One rope table. Equal specs share a table.

    Dimension i of the first `rotary_dim` turns together with i + rotary_dim/2:
    (x_i, x_j) ← (x_i·cos − x_j·sin, x_j·cos + x_i·sin) with the angle position · inverse_frequencies()[i];
    cos and sin are multiplied by `attention_factor`. Dimensions from rotary_dim on stay as they are.
    """

    kind: RopeKind
    theta: float
    head_dim: int
    rotary_dim: int
    """Even, at most head_dim."""
    factor: float = 1.0
    """Of LINEAR, LLAMA3, YARN and PROPORTIONAL: how much longer than trained for."""
    original_max_position: int = 0
    """Of LLAMA3 and YARN."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Of YARN: round the ramp's bounds to whole dimensions."""
    attention_factor: float = 1.0
    rotated_angles: int = 0
    """Of PROPORTIONAL: frequencies that are not zero; the rotation spans the whole head."""
    frequency_factors: tuple[float, ...] = ()
    """Divisors of each frequency that a GGUF file brings along; empty: none."""

    def inverse_frequencies(self) -> NDArray[np.float32]:
        """Angle per position, float32 [rotary_dim / 2]."""
        frequencies = _FORMULAS[self.kind](self)
        if self.frequency_factors:
            frequencies /= np.asarray(self.frequency_factors, np.float32)
        return frequencies


def _plain(rope: RopeSpec) -> NDArray[np.float32]:
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    return np.asarray(1.0 / np.power(np.float32(rope.theta), exponents), np.float32)


def _linear(rope: RopeSpec) -> NDArray[np.float32]:
    return np.asarray(_plain(rope) / rope.factor, np.float32)


def _llama3(rope: RopeSpec) -> NDArray[np.float32]:
    """Long waves are stretched, short ones kept, those between blended."""
    frequencies = _plain(rope)
    wavelengths = 2 * math.pi / frequencies
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_stretched = rope.original_max_position / rope.low_freq_factor
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    stretched = np.where(wavelengths > shortest_stretched, frequencies / rope.factor, blended)
    return np.where(wavelengths < longest_kept, frequencies, stretched).astype(np.float32)


def _yarn(rope: RopeSpec) -> NDArray[np.float32]:
    """A ramp over dimensions from extrapolation (fast ones) to interpolation (slow ones)."""

    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(rope.rotary_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    kept = _plain(rope)
    return np.asarray(kept / rope.factor * ramp + kept * (1 - ramp), np.float32)


def _proportional(rope: RopeSpec) -> NDArray[np.float32]:
    """Only the first angles of a table made for the whole head turn; the rest are zero."""
    exponents = np.arange(0, 2 * rope.rotated_angles, 2, dtype=np.float32) / np.float32(rope.head_dim)
    frequencies = np.zeros(rope.rotary_dim // 2, np.float32)
    frequencies[: rope.rotated_angles] = 1.0 / np.power(np.float32(rope.theta), exponents)
    return np.asarray(frequencies / rope.factor, np.float32)


_FORMULAS = {
    RopeKind.DEFAULT: _plain,
    RopeKind.LINEAR: _linear,
    RopeKind.LLAMA3: _llama3,
    RopeKind.YARN: _yarn,
    RopeKind.PROPORTIONAL: _proportional,
}
