"""What the scheduler tells about itself: counts when asked, and times as they happen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from worker.messages import FinishReason, RejectReason


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """The state of affairs at one moment; counters count from the start of the worker."""

    running: int
    """Sequences that hold a slot."""
    waiting: int
    """Sequences in line for a slot, preempted ones too, paused ones not."""
    paused: int
    slots: int
    pages: int
    pages_free: int
    """Pages that hold nothing."""
    pages_cached: int
    """Pages that nobody uses and that hold a reusable prefix; evicted when needed. In use are
    pages − pages_free − pages_cached."""
    is_draining: bool
    steps: int
    """Steps planned."""
    preemptions: int
    prefix_queries: int
    """Tokens of started sequences that were looked for in the prefix cache."""
    prefix_hits: int
    """Those of them that were found."""
    prompt_tokens: int
    """Tokens of the prompts of started sequences, cached ones included."""
    prefill_tokens: int
    """Tokens computed in prefill chunks, recomputation included."""
    generated_tokens: int
    """Tokens sampled for sequences that were still wanted."""
    finished: Mapping[FinishReason, int]
    rejected: Mapping[RejectReason, int]


class SchedulerObserver(Protocol):
    """Told of rare events (never once per token); must return quickly and not call back."""

    def started(self, queue_s: float) -> None:
        """A sequence's first chunk is in a step, so long after its submission."""

    def first_token(self) -> None:
        """A sequence's first new token was collected."""
