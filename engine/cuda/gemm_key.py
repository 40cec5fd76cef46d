"""What identifies a matrix product, apart from where its operands lie."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kernels.tensor import DType

FP8_MULTIPLE = 16
"""Of n and of k, for cuBLASLt to multiply e4m3."""
FAST_ACCUMULATION_ROWS = 256
"""From so many rows on, products of e4m3 add up in the tensor cores' own few bits, without moving partial
sums out to float32: on an H200 that saves 6–18% from there on, and nothing at 64 rows. Against float64, in
terms of the root of the squared terms' sum, it errs by 1.0–2.9e-3 instead of 1.6e-4; rounding sums to bf16
errs by 1.7e-3, rounding both operands to e4m3 by 3.7e-2."""


class Epilogue(StrEnum):
    """What happens to the float32 product on its way to y."""

    NONE = "none"
    BIAS = "bias"
    """+ bias [n] of y's type."""
    ADD = "add"
    """+ c [rows, n] of y's type; c may be y itself. With bf16 outputs some algorithms round the product
    before they add, as separate operations would."""


@dataclass(frozen=True, slots=True)
class GemmKey:
    """A product: y[rows, n] = x[rows, k] · W[n, k]ᵀ, all row-major and contiguous, float32 sums.

    x and W are bf16, or both e4m3. Products of e4m3 know no scales: y holds the raw sums, to be multiplied by
    the scales where they are read. They cannot overflow: |sum| ≤ 448² · k.
    """

    rows: int
    n: int
    k: int
    x: DType = DType.BF16
    w: DType = DType.BF16
    y: DType = DType.BF16
    """bf16 or float32."""
    epilogue: Epilogue = Epilogue.NONE

    def __str__(self) -> str:
        """As files and messages have it, e.g. "8×4096×2048 bf16·bf16→bf16 add": rows × n × k."""
        sizes = f"{self.rows}×{self.n}×{self.k}"
        return f"{sizes} {self.x.value}·{self.w.value}→{self.y.value} {self.epilogue.value}"

    @property
    def is_fp8(self) -> bool:
        return DType.E4M3 in (self.x, self.w)

    @property
    def accumulates_fast(self) -> bool:
        """See FAST_ACCUMULATION_ROWS."""
        return self.is_fp8 and self.rows >= FAST_ACCUMULATION_ROWS

    @property
    def misfit(self) -> str | None:
        """Why there can be no such product, for types and sizes alone; None if there may be."""
        if not self.is_fp8:
            return None
        if self.x is not self.w:
            return "e4m3 is multiplied by e4m3 alone"
        if self.epilogue is not Epilogue.NONE:
            return "the raw sums of e4m3 take no epilogue: their scales come later"
        if not fits_fp8(self.n, self.k):
            return f"n and k of e4m3 must be multiples of {FP8_MULTIPLE}"
        return None

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.n * self.k

    @property
    def weight_bytes(self) -> int:
        return self.n * self.k * self.w.bytes

    @property
    def bytes(self) -> int:
        """The least that must move: every operand read once, the result written once."""
        added = {Epilogue.NONE: 0, Epilogue.BIAS: self.n, Epilogue.ADD: self.rows * self.n}[self.epilogue]
        return (
            self.weight_bytes
            + self.rows * self.k * self.x.bytes
            + (self.rows * self.n + added) * self.y.bytes
        )


def fits_fp8(n: int, k: int) -> bool:
    """Whether a weight [n, k] of e4m3 can be multiplied by."""
    return n % FP8_MULTIPLE == 0 and k % FP8_MULTIPLE == 0
