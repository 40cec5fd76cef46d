"""FP8 weights on the device: e4m3 with a float32 scale per row."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """A matrix [n, k]; value = scale[row] · e4m3."""

    values: Tensor
    """e4m3 [n, k]."""
    scale: Tensor
    """float32 [n]."""

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        n, k = self.values.shape
        return n, k
