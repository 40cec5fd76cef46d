"""What products of few rows do beside multiplying: the norm before them, and what becomes of their sums."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kernels.tensor import Tensor


class Finish(IntEnum):
    """What becomes of the float32 sums."""

    STORE = 0
    ADD = 1
    """Added to what stands in y."""
    SWIGLU = 2
    """The weights are gate over up; y = silu(gate) · up."""


@dataclass(frozen=True, slots=True)
class FusedNorm:
    """RMSNorm of x: x / rms(x) · (offset + gains)."""

    gains: Tensor
    """bf16 [k]."""
    epsilon: float
    offset: float = 0.0
