"""How an engine is to be set up: read once at start, passed down, never looked up in mid-flight."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Choices of `slipstream serve` that concern the engine."""

    model: Path
    """A local checkpoint folder or a .gguf file."""
    engine: str = "auto"
    """"auto" (cuda where a GPU is usable, else reference), "cuda", "reference" or "simulated"."""
    device: int = 0
    """Index of the GPU among the visible ones."""
    max_sequences: int = 16
    """Slots."""
    max_sequence_length: int | None = None
    """Most tokens of prompt and output; None takes the model's own limit, as far as memory allows."""
    max_step_tokens: int = 2048
    """Token budget of one step."""
    kv_pages: int | None = None
    """KV pages; None sizes them from the memory budget."""
    memory_fraction: float = 0.9
    """Share of the device's (or, for the reference engine, of the host's free) memory to use."""
    threads: int | None = None
    """BLAS threads of the reference engine; None takes all cores of the process."""
    simulated_step_us: float = 0.0
    """Time one step of the simulated engine takes."""
