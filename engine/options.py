"""How an engine is to be set up: read once at start, passed down, never looked up in mid-flight."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from engine.errors import ModelError


class Precision(StrEnum):
    """How the weights of linear layers are held. Embedding lookups, norms and biases stay as they are."""

    AUTO = "auto"
    """What suits the checkpoint: q4 for GGUF files that are mostly Q4_0, fp8 for published FP8 weights with a
    scale per row or tensor, else bf16."""
    BF16 = "bf16"
    Q4 = "q4"
    """q4_0: blocks of 32 with one f16 scale; the head too."""
    FP8 = "fp8"
    """e4m3 with one float32 scale per output row; the head stays bf16."""


class KvDtype(StrEnum):
    """How keys and values are cached."""

    AUTO = "auto"
    """bf16; the reference engine keeps float32."""
    BF16 = "bf16"
    FP8 = "fp8"
    """e4m3 with one scale, a power of two, per page and kv head."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """How much an engine takes on at once. Each engine has one of what suits it, beside its code."""

    max_sequences: int
    """Slots."""
    max_step_tokens: int
    """Token budget of one step."""
    prefill_tokens_beside_decodes: int | None = None
    """As in EngineCapacity; the scheduler's options may say otherwise."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Choices of `slipstream serve` that concern the engine."""

    model: Path
    """A local checkpoint folder or a .gguf file."""
    engine: str = "auto"
    """"auto" (cuda where a GPU is usable, else reference), "cuda", "reference" or "simulated"."""
    device: int = 0
    """Index of the GPU among the visible ones."""
    max_sequences: int | None = None
    """Slots; None takes what suits the engine."""
    max_sequence_length: int | None = None
    """Most tokens of prompt and output; None takes the model's own limit, as far as memory allows."""
    max_step_tokens: int | None = None
    """Token budget of one step; None takes what suits the engine."""
    kv_pages: int | None = None
    """KV pages; None sizes them from the memory budget."""
    precision: Precision = Precision.AUTO
    """Of the linear layers' weights."""
    kv_dtype: KvDtype = KvDtype.AUTO
    """Of cached keys and values."""
    memory_fraction: float = 0.9
    """Share of the device's (or, for the reference engine, of the host's free) memory to use."""
    threads: int | None = None
    """BLAS threads of the reference engine; None takes all cores of the process."""
    simulated_step_us: float = 0.0
    """Time one step of the simulated engine takes."""

    def sizes(self, suited: StepSizes) -> StepSizes:
        """What was chosen and, for the rest, what suits the engine, made to go with it.

        Raises ModelError if a step has no room for a token of each sequence.
        """
        sequences, tokens = self.max_sequences, self.max_step_tokens
        if sequences is None:
            sequences = min(suited.max_sequences, tokens or suited.max_sequences)
        if tokens is None:
            tokens = max(suited.max_step_tokens, sequences)
        if tokens < sequences:
            raise ModelError(
                f"max_step_tokens {tokens} has no room for a token of each of {sequences} sequences: raise "
                "it or lower max_sequences."
            )
        return StepSizes(sequences, tokens, suited.prefill_tokens_beside_decodes)
