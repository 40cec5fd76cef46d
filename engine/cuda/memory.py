"""What device memory is spent on: planned before a byte is allocated, then one arena that is never resized.

Parts reserve named tensors in a Layout; plan_memory fits KV pages into what is left; Arena backs the layout
with one allocation and hands the tensors out. Only Arena.allocate needs a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

from engine.errors import ModelError
from engine.interface import PAGE_SIZE
from engine.options import EngineOptions
from kernels.tensor import DType, Tensor

ALIGNMENT = 256
"""Bytes; of every tensor in an arena: whole sectors, and more than any kernel or GEMM asks for."""

ADVICE = {
    "weights": "take a smaller model or one of fewer bits",
    "activations": "lower max_step_tokens",
    "logits": "lower max_sequences",
    "slot_state": "lower max_sequences or max_sequence_length",
    "recurrent_state": "lower max_sequences",
    "kv_pages": "lower kv_pages, max_sequences or max_sequence_length",
}
"""What to change for a part to shrink, for those parts where anything can be done."""


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
        if self._owner is not None:
            self._owner.free(self.address)
            self._owner = None
            self._tensors.clear()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes that follow from the model, the options and the memory there is."""

    pages: int
    max_sequence_length: int
    bytes_by_purpose: dict[str, int]
    """Fixed parts in order, then "kv_pages"."""
    budget: int
    shortened: str | None = None
    """Why the longest sequence is shorter than was asked for, if memory is the reason."""


def memory_budget(total: int, free: int, fraction: float) -> int:
    """Bytes this process may take: a share of the whole device, less what is held already.

    total, free: of the device, with the context created and nothing else of ours allocated.
    """
    return max(0, int(total * fraction) - (total - free))


def plan_memory(
    fixed: Mapping[str, int], page_bytes: int, options: EngineOptions, model_length: int, budget: int
) -> MemoryPlan:
    """Fits KV pages into what `budget` leaves beside the fixed parts.

    fixed         bytes by part, as Layout.bytes_by_part() has them and more (workspace, reserve)
    page_bytes    of one page over all layers, K and V
    model_length  positions the model was made for

    Without options.kv_pages all that is left becomes pages. Raises ModelError that says what each part
    costs and what to lower.
    """
    longest = _wanted_length(options, model_length)
    affordable = (budget - sum(fixed.values())) // max(1, page_bytes)
    required = options.kv_pages
    if required is None:
        required = 1 if options.max_sequence_length is None else pages_for(longest)
    if affordable < required:
        raise ModelError(_does_not_fit(fixed, page_bytes, required, budget, options))
    pages = affordable if options.kv_pages is None else options.kv_pages
    if options.max_sequence_length is not None and pages_for(longest) > pages:
        raise ModelError(
            f"{pages} KV pages hold {pages * PAGE_SIZE} tokens, less than one sequence of the requested "
            f"{longest}: raise kv_pages or lower max_sequence_length."
        )
    held = pages * PAGE_SIZE
    shortened = None
    if held < longest:
        shortened = f"longest sequence cut from {longest} to {held} tokens by the KV pages"
    return MemoryPlan(
        pages=pages,
        max_sequence_length=min(longest, held),
        bytes_by_purpose={**fixed, "kv_pages": pages * page_bytes},
        budget=budget,
        shortened=shortened,
    )


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE_SIZE)


def _wanted_length(options: EngineOptions, model_length: int) -> int:
    if options.max_sequence_length is None:
        return model_length
    if not 1 <= options.max_sequence_length <= model_length:
        raise ModelError(
            f"max_sequence_length {options.max_sequence_length} is not in 1 … {model_length}, "
            "which the model was made for."
        )
    return options.max_sequence_length


def _does_not_fit(
    fixed: Mapping[str, int], page_bytes: int, pages: int, budget: int, options: EngineOptions
) -> str:
    parts = {**fixed, "kv_pages": pages * page_bytes}
    costs = ", ".join(f"{name.replace('_', ' ')} {_size(size)}" for name, size in parts.items())
    largest = sorted(parts, key=lambda name: -parts[name])
    advice = dict.fromkeys(ADVICE[name] for name in largest if name in ADVICE and parts[name])
    return (
        f"The model does not fit into {_size(budget)} of device memory (memory_fraction "
        f"{options.memory_fraction}, less what others hold): {costs}, {_size(sum(parts.values()))} in all. "
        f"To make it fit, largest part first: {'; '.join(advice) or 'raise memory_fraction'}."
    )


def aligned(size: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
