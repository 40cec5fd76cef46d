"""What the reference engine's memory is spent on, decided before a weight is read. Allocates nothing."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from engine.config import AttentionSpec, DenseSpec, LayerSpec, ModelConfig, expected_tensors
from engine.errors import ModelError
from engine.interface import PAGE_SIZE, pages_for
from engine.options import EngineOptions

_FLOAT = 4
_USUAL_LENGTH = 2048
"""Tokens per sequence that pages are provided for where nothing is said: enough for most chats."""
_TILE_BYTES = 128 * 1024 * 1024
"""Scores, weights and masks of one attention tile at the longest context."""
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes that follow from the model, the options and the memory there is."""

    pages: int
    max_sequence_length: int
    bytes_by_purpose: dict[str, int]
    shortened: str | None
    """Why the longest sequence is shorter than the model's, if memory is the reason."""


def plan_memory(config: ModelConfig, options: EngineOptions, available: int | None = None) -> MemoryPlan:
    """Fits KV pages into memory_fraction of the host's free bytes (`available`) beside everything else.

    Raises ModelError that says what each part costs and what to lower.
    """
    longest = _wanted_length(config, options)
    fixed = {
        "weights": parameter_count(config) * _FLOAT,
        "recurrent_state": options.max_sequences * config.state_elements_per_sequence() * _FLOAT,
        "workspace": _workspace(config, options),
    }
    free = available_bytes() if available is None else available
    budget = int(free * options.memory_fraction)
    page_bytes = PAGE_SIZE * config.kv_elements_per_token() * _FLOAT
    affordable = (budget - sum(fixed.values())) // max(1, page_bytes)
    wanted = options.kv_pages
    if wanted is None:
        usual = options.max_sequences * pages_for(min(longest, _USUAL_LENGTH))
        wanted = min(max(usual, pages_for(longest)), affordable)
    required = wanted
    if options.max_sequence_length is not None:
        required = max(wanted, pages_for(longest))
    if affordable < max(1, required):
        raise ModelError(_does_not_fit(fixed, page_bytes, max(1, required), budget, options))
    if options.max_sequence_length is not None and pages_for(longest) > wanted:
        raise ModelError(
            f"{wanted} KV pages hold {wanted * PAGE_SIZE} tokens, less than one sequence of the requested "
            f"{longest}: raise kv_pages or lower max_sequence_length."
        )
    shortened = None
    if wanted * PAGE_SIZE < longest:
        shortened = f"longest sequence cut from {longest} to {wanted * PAGE_SIZE} tokens by the KV pages"
    return MemoryPlan(
        pages=wanted,
        max_sequence_length=min(longest, wanted * PAGE_SIZE),
        bytes_by_purpose={**fixed, "kv_pages": wanted * page_bytes},
        shortened=shortened,
    )


def parameter_count(config: ModelConfig) -> int:
    """Numbers in all weights; a tied head counts once."""
    return sum(math.prod(shape) for shape in expected_tensors(config).values())


def available_bytes() -> int:
    """Memory that this process can still take without swapping: the host's, or its container's if less."""
    limits = [_host_available()]
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        cache = _field((_CGROUP / "memory.stat").read_text(), "inactive_file")
    except (OSError, ValueError):
        return limits[0]
    if limit != "max":
        limits.append(int(limit) - used + cache)
    return max(0, min(limits))


def _host_available() -> int:
    try:
        return _field(_MEMINFO.read_text(), "MemAvailable:") * 1024
    except (OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _field(text: str, name: str) -> int:
    """The number after a name at the start of a line. Raises ValueError without such a line."""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name:
            return int(words[1])
    raise ValueError(f"no {name}")


def _wanted_length(config: ModelConfig, options: EngineOptions) -> int:
    if options.max_sequence_length is None:
        return config.max_sequence_length
    if not 1 <= options.max_sequence_length <= config.max_sequence_length:
        raise ModelError(
            f"max_sequence_length {options.max_sequence_length} is not in 1 … {config.max_sequence_length}, "
            "which the model was made for."
        )
    return options.max_sequence_length


def _workspace(config: ModelConfig, options: EngineOptions) -> int:
    """Activations of the widest step, logits of all sampled rows, and attention's tiles."""
    widest = max(_layer_width(layer) for layer in config.layers)
    activations = options.max_step_tokens * (4 * config.hidden_size + 3 * widest)
    logits = 2 * max(8, options.max_sequences) * config.vocab_size
    return (activations + logits) * _FLOAT + _TILE_BYTES


def _layer_width(layer: LayerSpec) -> int:
    mixer, feed_forward = layer.mixer, layer.feed_forward
    if isinstance(mixer, AttentionSpec):
        mixer_width = mixer.q_rows + 2 * mixer.kv_dim
    else:
        mixer_width = 2 * mixer.conv_dim + mixer.value_dim
    if isinstance(feed_forward, DenseSpec):
        return max(mixer_width, 2 * feed_forward.intermediate)
    return max(mixer_width, 2 * feed_forward.intermediate * feed_forward.top_k)


def _does_not_fit(
    fixed: dict[str, int], page_bytes: int, pages: int, budget: int, options: EngineOptions
) -> str:
    parts = [f"{name.replace('_', ' ')} {_megabytes(size)}" for name, size in fixed.items()]
    parts.append(f"{pages} KV pages of {_megabytes(page_bytes)}")
    return (
        f"The model does not fit into {_megabytes(budget)} (memory_fraction {options.memory_fraction} of "
        f"what is free): {', '.join(parts)}. Lower max_sequences, max_sequence_length, max_step_tokens or "
        "kv_pages, or take a smaller model."
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
