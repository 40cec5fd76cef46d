"""Choices that shape the scheduler. Knows no engine and no queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

PrefillPolicy = Literal["together", "alternating"]


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Read once at start."""

    max_queued: int = 1024
    """Most sequences (a request with n answers has n) that may wait beyond those that find a free slot."""
    prefill_tokens_beside_decodes: int | None = None
    """Most prompt tokens in a step that also decodes, to bound the time between two tokens of a running
    stream; None takes what the engine advises."""
    prefill_policy: PrefillPolicy = "together"
    """"together": chunks and decode rows share steps, and the engine mixes or overlaps them.
    "alternating": while there are both, steps take turns."""
    prefix_caching: bool = True
    """Share pages between sequences with a common prefix; the engine may rule it out."""
    abort_memory_size: int = 10_000
    """Aborts of unknown request ids that are remembered at most."""
    abort_memory_s: float = 60.0
    """How long they are remembered."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the option that makes no sense."""
        if self.max_queued < 0:
            raise ValueError(f"max_queued must be at least 0, not {self.max_queued}")
        if self.prefill_tokens_beside_decodes is not None and self.prefill_tokens_beside_decodes < 1:
            raise ValueError(
                "prefill_tokens_beside_decodes must be at least 1 (or unset), "
                f"not {self.prefill_tokens_beside_decodes}"
            )
        if self.prefill_policy not in get_args(PrefillPolicy):
            raise ValueError(
                f'prefill_policy must be "together" or "alternating", not "{self.prefill_policy}"'
            )
        if self.abort_memory_size < 0 or self.abort_memory_s < 0:
            raise ValueError("abort_memory_size and abort_memory_s must not be negative")
