"""What a simulated engine should pretend to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.interface import EngineCapacity


@dataclass(frozen=True, slots=True)
class SimulatedOptions:
    """Size, speed, vocabulary and misfortunes."""

    slots: int = 16
    pages: int = 1024
    max_sequence_length: int = 4096
    max_step_tokens: int = 2048
    pipeline_depth: int = 2
    prefix_cacheable: bool = True
    prefill_tokens_beside_decodes: int | None = None
    vocab_size: int = 32_000
    token_ids: tuple[int, ...] = ()
    """Tokens to generate; empty: any of the vocabulary."""
    stop_one_in: int = 0
    """About one token in so many is the lowest of the sequence's stop tokens. 0: none on purpose."""
    step_s: float = 0.0
    """How long one step takes; steps run one after the other."""
    validate: bool = True
    """Check every plan against the contract and every page that is read; costs most of the time."""
    fault_token: int | None = None
    """A prompt that contains it fails, alone."""
    fault: Callable[[int, int], str | None] | None = None
    """Called with step and slot of every row; a text makes this sequence fail with it."""
    break_token: int | None = None
    """A prompt that contains it breaks the engine."""

    def capacity(self) -> EngineCapacity:
        """What the engine lets its caller hand out."""
        return EngineCapacity(
            slots=self.slots,
            pages=self.pages,
            max_sequence_length=self.max_sequence_length,
            max_step_tokens=self.max_step_tokens,
            pipeline_depth=self.pipeline_depth,
            prefix_cacheable=self.prefix_cacheable,
            prefill_tokens_beside_decodes=self.prefill_tokens_beside_decodes,
        )
