"""Device memory is one arena: laid out before a byte is allocated, and never resized.

Parts reserve named tensors in a Layout; Arena backs the layout with one allocation and hands the tensors out.
Only Arena.allocate needs a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Protocol

from engine.memory_plan import MemoryBudget
from kernels.tensor import DType, Tensor

ALIGNMENT = 256
"""Bytes; of every tensor in an arena: whole sectors, and more than any kernel or GEMM asks for."""


class Allocator(Protocol):
    """Where an arena's memory comes from: a Device."""

    def allocate(self, size: int) -> int: ...

    def free(self, address: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Reservation:
    """A tensor's place in an arena."""

    part: str
    shape: tuple[int, ...]
    dtype: DType
    offset: int
    """Bytes from the arena's start."""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.bytes


class Layout:
    """Places for named tensors one after the other. Allocates nothing."""

    def __init__(self) -> None:
        self.reservations: dict[str, Reservation] = {}
        self.bytes = 0
        """Of all so far, gaps for alignment included."""

    def add(self, part: str, name: str, shape: tuple[int, ...], dtype: DType) -> None:
        """Reserves a tensor. part: what it counts as in the plan. Raises ValueError for a name in use."""
        if name in self.reservations:
            raise ValueError(f"the arena has two tensors named {name!r}")
        self.reservations[name] = Reservation(part, shape, dtype, self.bytes)
        self.bytes += aligned(self.reservations[name].bytes)

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes of each part, in the order first met; they sum to `bytes`."""
        parts: dict[str, int] = {}
        for reservation in self.reservations.values():
            parts[reservation.part] = parts.get(reservation.part, 0) + aligned(reservation.bytes)
        return parts

    def span(self, *parts: str) -> tuple[int, int]:
        """(offset, bytes) from the first tensor of these parts to the end of the last.

        Raises ValueError if tensors of other parts lie between.
        """
        places = list(self.reservations.values())
        found = [index for index, place in enumerate(places) if place.part in parts]
        if not found:
            return 0, 0
        first, last = found[0], found[-1]
        if last - first + 1 != len(found):
            raise ValueError(f"{', '.join(parts)} do not lie together in the arena")
        end = places[last].offset + places[last].bytes
        return places[first].offset, end - places[first].offset


class Arena:
    """One block of device memory behind a layout."""

    def __init__(self, layout: Layout, address: int, owner: Allocator | None = None) -> None:
        """address: of layout.bytes bytes, aligned to ALIGNMENT. owner: to whom close() gives them back."""
        if address % ALIGNMENT:
            raise ValueError(f"an arena at {address:#x} is not aligned to {ALIGNMENT} bytes")
        self.address = address
        self.bytes = layout.bytes
        self._owner = owner
        self._tensors = {
            name: Tensor(address + place.offset, place.shape, place.dtype)
            for name, place in layout.reservations.items()
        }

    @classmethod
    def allocate(cls, layout: Layout, owner: Allocator) -> Arena:
        """Raises OutOfDeviceMemory."""
        return cls(layout, owner.allocate(max(layout.bytes, ALIGNMENT)), owner)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> Tensor:
        """Raises KeyError for a name that was not reserved."""
        return self._tensors[name]

    def close(self) -> None:
        """Frees the block; nothing may use its tensors any more. Idempotent."""
        owner, self._owner = self._owner, None
        if owner is not None:
            self._tensors.clear()
            owner.free(self.address)


def memory_budget(total: int, free: int, fraction: float) -> MemoryBudget:
    """What this process may take: a share of the whole device, less what is held already.

    total, free: bytes of the device, with the context created and nothing else of ours allocated.
    """
    size = max(0, int(total * fraction) - (total - free))
    return MemoryBudget(size, "device memory, less what others hold")


def aligned(size: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT
