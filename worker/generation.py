"""One request as its servicer holds it: submit, read merged updates, close. Knows no socket and no worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.interface import IntArray, Sampling, TokenLogprobs
from worker.messages import FinishReason, RejectReason


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a front asks of the pool."""

    request_id: str
    prompt: Sequence[int] | IntArray
    """At least one token."""
    sampling: Sampling
    """Of answer 0; answer i runs with seed + i (mod 2⁶⁴)."""
    max_tokens: int
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    time_left_s: float | None = None


class Rejection(Exception):
    """A request was not admitted. Raised by submit() or by the first next()."""

    def __init__(self, reason: RejectReason, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class AnswerStarted:
    """The worker has begun to work on an answer."""

    cached_tokens: int
    """Prompt tokens found in the cache."""
    queue_s: float
    """From the submission's arrival at the worker to its first step."""


@dataclass(frozen=True, slots=True)
class AnswerFinished:
    """An answer is over."""

    reason: FinishReason
    message: str = ""
    """For FAULT: what happened."""
    preemptions: int = 0


@dataclass(slots=True)
class AnswerUpdate:
    """What is new about one answer since the last update."""

    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per token, where asked for."""
    started: AnswerStarted | None = None
    """At most once per answer, even if a worker dies and another takes over."""
    finished: AnswerFinished | None = None
    """Once, in the answer's last update."""


@dataclass(slots=True)
class Update:
    """What is new about a request since the last update: only answers with news."""

    answers: list[AnswerUpdate]
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Whole, once, where asked for: for prompt tokens 1 … n−1."""


class Generation:
    """A request under way. Made by WorkerPool.submit(); used from the pool's event loop by one task."""

    request: GenerationRequest

    async def next(self) -> Update | None:
        """Waits for news and returns all of it, merged; None when every answer is over and was reported.

        Raises Rejection (first call only) if the worker did not admit the request.
        """
        raise NotImplementedError

    def finish(self, index: int) -> None:
        """The caller wants no more of this answer (a stop string came): it counts as over at once and no
        update speaks of it again. Idempotent."""
        raise NotImplementedError

    def close(self) -> None:
        """Cancels what remains. To be called in `finally`. Idempotent."""
        raise NotImplementedError
