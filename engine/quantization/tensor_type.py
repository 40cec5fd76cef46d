"""The ways a weight's elements can be stored, and their block sizes. Knows no file and no kernel."""

from __future__ import annotations

from enum import StrEnum


class TensorType(StrEnum):
    """How elements are stored. Blocks of the q… types are GGUF's and run along the last dimension."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    F8_E4M3 = "f8_e4m3"
    """Means nothing without its scale."""
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    Q8_0 = "q8_0"
    Q4_K = "q4_k"
    Q5_K = "q5_k"
    Q6_K = "q6_k"

    @property
    def block_elements(self) -> int:
        """Elements in one block; 1 for plain types."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block; the item size for plain types."""
        return _BLOCKS[self][1]

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of so many elements. Raises ValueError unless they fill whole blocks."""
        if columns % self.block_elements:
            raise ValueError(f"{columns} columns do not fill whole {self} blocks of {self.block_elements}")
        return columns // self.block_elements * self.block_bytes


_BLOCKS = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.BF16: (1, 2),
    TensorType.F8_E4M3: (1, 1),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
    TensorType.Q5_0: (32, 22),
    TensorType.Q5_1: (32, 24),
    TensorType.Q8_0: (32, 34),
    TensorType.Q4_K: (256, 144),
    TensorType.Q5_K: (256, 176),
    TensorType.Q6_K: (256, 210),
}
