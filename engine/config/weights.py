"""How a checkpoint stores quantised weights, as far as its configuration tells. Reads no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class WeightScheme(StrEnum):
    """The scheme of a checkpoint's linear layers."""

    PLAIN = "plain"
    """bf16, f16, f32, or whatever each GGUF tensor says."""
    FP8_TENSOR = "fp8-tensor"
    """e4m3 with one float scale per tensor."""
    FP8_ROW = "fp8-row"
    """e4m3 with one float scale per output row."""
    FP8_BLOCK = "fp8-block"
    """e4m3 with one float scale per block of rows and columns."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A weight is value · scale, whatever the scale's name in the file."""

    scheme: WeightScheme = WeightScheme.PLAIN
    block: tuple[int, int] | None = None
    """Rows and columns of one scale for FP8_BLOCK."""
