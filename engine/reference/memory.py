"""What the reference engine's memory is spent on, decided before a weight is read. Allocates nothing."""

from __future__ import annotations

import math
import os
from pathlib import Path

from engine.config import AttentionSpec, DenseSpec, LayerSpec, ModelConfig, expected_tensors
from engine.interface import PAGE_SIZE, pages_for
from engine.memory_plan import MemoryBudget, MemoryPlan, fit_pages, wanted_length
from engine.options import EngineOptions, Precision, StepSizes

_FLOAT = 4
_USUAL_LENGTH = 2048
"""Tokens per sequence that pages are provided for where nothing is said: enough for most chats."""
_FEWEST_LOGITS_ROWS = 8
"""Few slots still have the rows of a prompt's log-probabilities."""
_TILE_BYTES = 128 * 1024 * 1024
"""Scores, weights and masks of one attention tile at the longest context."""
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def plan_memory(
    config: ModelConfig, options: EngineOptions, sizes: StepSizes, available: int | None = None
) -> MemoryPlan:
    """Fits KV pages into memory_fraction of the host's free bytes (`available`) beside everything else.

    Raises ModelError that says what each part costs and what to lower.
    """
    free = available_bytes() if available is None else available
    longest = wanted_length(options, config.max_sequence_length)
    usual = sizes.max_sequences * pages_for(min(longest, _USUAL_LENGTH))
    return fit_pages(
        {
            "weights": (parameter_count(config) + _head_copy(config, options)) * _FLOAT,
            "recurrent_state": sizes.max_sequences * config.state_elements_per_sequence() * _FLOAT,
            "activations": _activations(config, sizes),
            "logits": 2 * max(_FEWEST_LOGITS_ROWS, sizes.max_sequences) * config.vocab_size * _FLOAT,
        },
        PAGE_SIZE * config.kv_elements_per_token() * _FLOAT,
        options,
        model_length=config.max_sequence_length,
        budget=MemoryBudget(int(free * options.memory_fraction), "the host's free memory"),
        usual_pages=max(usual, pages_for(longest)),
    )


def _head_copy(config: ModelConfig, options: EngineOptions) -> int:
    """Numbers in a tied head that is held apart from the embedding, since it alone is quantised."""
    is_apart = config.tied_embeddings and options.precision is Precision.Q4
    return config.vocab_size * config.hidden_size if is_apart else 0


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


def _activations(config: ModelConfig, sizes: StepSizes) -> int:
    """Bytes of the widest step's rows and of attention's tiles."""
    widest = max(_layer_width(layer) for layer in config.layers)
    rows = sizes.max_step_tokens * (4 * config.hidden_size + 3 * widest)
    return rows * _FLOAT + _TILE_BYTES


def _layer_width(layer: LayerSpec) -> int:
    mixer, feed_forward = layer.mixer, layer.feed_forward
    if isinstance(mixer, AttentionSpec):
        mixer_width = mixer.q_rows + 2 * mixer.kv_dim
    else:
        mixer_width = 2 * mixer.conv_dim + mixer.value_dim
    if isinstance(feed_forward, DenseSpec):
        return max(mixer_width, 2 * feed_forward.intermediate)
    return max(mixer_width, 2 * feed_forward.intermediate * feed_forward.top_k)
