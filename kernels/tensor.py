"""A typed view of device memory: address, shape, dtype. Owns nothing; always contiguous, row-major."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod


class DType(Enum):
    """Element types of device buffers."""

    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"
    E4M3 = "e4m3"
    I32 = "i32"
    U32 = "u32"
    U64 = "u64"
    U8 = "u8"

    @property
    def bytes(self) -> int:
        return _BYTES[self]


_BYTES = {
    DType.BF16: 2, DType.F16: 2, DType.F32: 4, DType.E4M3: 1, DType.I32: 4, DType.U32: 4, DType.U64: 8,
    DType.U8: 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """`shape` elements of `dtype` at a device address."""

    address: int
    shape: tuple[int, ...]
    dtype: DType

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.bytes

    def rows(self, start: int, stop: int) -> Tensor:
        """Entries start … stop − 1 of the first axis. Raises ValueError beyond the tensor."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise ValueError(f"rows {start} … {stop} of a tensor with {self.shape[0]}")
        row_bytes = prod(self.shape[1:]) * self.dtype.bytes
        return Tensor(self.address + start * row_bytes, (stop - start, *self.shape[1:]), self.dtype)

    def view(self, *shape: int) -> Tensor:
        """The same bytes in another shape of as many elements."""
        if prod(shape) != prod(self.shape):
            raise ValueError(f"a tensor of shape {self.shape} cannot be seen as {shape}")
        return Tensor(self.address, shape, self.dtype)


def expect(kernel: str, name: str, tensor: Tensor, dtype: DType, shape: tuple[int | None, ...]) -> None:
    """Raises ValueError unless it has this dtype and shape (None: any length) and is 16-byte aligned."""
    fits = len(tensor.shape) == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits or tensor.dtype is not dtype:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(
            f"{kernel}: {name} must be {dtype.value} [{wanted}], "
            f"got {tensor.dtype.value} {list(tensor.shape)}"
        )
    if tensor.address % 16:
        raise ValueError(f"{kernel}: {name} at {tensor.address:#x} is not aligned to 16 bytes")
