"""How memory is divided, decided before a byte is allocated: fixed parts first, KV pages from what is left.

Each engine says what its fixed parts cost and how much memory there is. Knows no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import ModelError
from engine.interface import PAGE_SIZE, pages_for
from engine.options import EngineOptions

ADVICE = {
    "weights": "lower precision to fp8 or q4, or take a smaller model",
    "activations": "lower max_step_tokens",
    "logits": "lower max_sequences",
    "slot_state": "lower max_sequences or max_sequence_length",
    "graphs": "lower max_sequences or max_step_tokens",
    "rope": "lower max_sequence_length",
    "recurrent_state": "lower max_sequences",
    "kv_pages": "lower kv_dtype to fp8, or lower kv_pages, max_sequences or max_sequence_length",
}
"""What to change for a part to shrink, for those parts where anything can be done."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes that follow from the model, the options and the memory there is."""

    pages: int
    max_sequence_length: int
    bytes_by_purpose: dict[str, int]
    """Fixed parts in order, then "kv_pages"."""
    shortened: str | None = None
    """Why the longest sequence is shorter than was asked for, if memory is the reason."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What an engine may take."""

    bytes: int
    source: str
    """Of what it is a share, for a refusal: "device memory, less what others hold"."""


def fit_pages(
    fixed: Mapping[str, int],
    page_bytes: int,
    options: EngineOptions,
    *,
    model_length: int,
    budget: MemoryBudget,
    usual_pages: int | None = None,
) -> MemoryPlan:
    """Fits KV pages into what the budget leaves beside the fixed parts.

    fixed         bytes by part
    page_bytes    of one page over all layers, K and V
    model_length  positions the model was made for
    usual_pages   to take without options.kv_pages, or as many as fit; None: all that fit

    Raises ModelError that says what each part costs and what to lower.
    """
    longest = wanted_length(options, model_length)
    affordable = (budget.bytes - sum(fixed.values())) // max(1, page_bytes)
    required = options.kv_pages
    if required is None:
        required = 1 if options.max_sequence_length is None else pages_for(longest)
    if affordable < required:
        raise ModelError(_does_not_fit({**fixed, "kv_pages": required * page_bytes}, budget, options))
    pages = options.kv_pages
    if pages is None:
        pages = affordable if usual_pages is None else min(affordable, usual_pages)
    held = pages * PAGE_SIZE
    if options.max_sequence_length is not None and held < longest:
        raise ModelError(
            f"{pages} KV pages hold {held} tokens, less than one sequence of the requested {longest}: raise "
            "kv_pages or lower max_sequence_length."
        )
    shortened = None
    if held < longest:
        shortened = f"longest sequence cut from {longest} to {held} tokens by the KV pages"
    return MemoryPlan(
        pages=pages,
        max_sequence_length=min(longest, held),
        bytes_by_purpose={**fixed, "kv_pages": pages * page_bytes},
        shortened=shortened,
    )


def wanted_length(options: EngineOptions, model_length: int) -> int:
    """Positions of the longest sequence that is asked for. Raises ModelError if the model cannot have it."""
    if options.max_sequence_length is None:
        return model_length
    if not 1 <= options.max_sequence_length <= model_length:
        raise ModelError(
            f"max_sequence_length {options.max_sequence_length} is not in 1 … {model_length}, "
            "which the model was made for."
        )
    return options.max_sequence_length


def _does_not_fit(parts: Mapping[str, int], budget: MemoryBudget, options: EngineOptions) -> str:
    costs = ", ".join(f"{name.replace('_', ' ')} {_size(size)}" for name, size in parts.items())
    largest = sorted(parts, key=lambda name: -parts[name])
    advice = dict.fromkeys(ADVICE[name] for name in largest if name in ADVICE and parts[name])
    return (
        f"The model does not fit into {_size(budget.bytes)} (memory_fraction {options.memory_fraction} of "
        f"{budget.source}): {costs}, {_size(sum(parts.values()))} in all. To make it fit, largest part "
        f"first: {'; '.join(advice) or 'raise memory_fraction'}."
    )


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
