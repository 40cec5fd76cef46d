"""What identifies a matrix product, apart from where its operands lie."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kernels.tensor import DType


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
    """A product: y[rows, n] = x[rows, k] · W[n, k]ᵀ, all row-major and contiguous, float32 sums."""

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
