"""The record of one answer: every token received, how many were read, and what else is still to be told.

The record is what counts when a worker dies: tokens in it were delivered, and the next worker goes on from
there. Knows no connection and no event loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from engine.interface import IntArray, Sampling, TokenLogprobs
from worker.messages import FinishReason, answer_seed
from worker.suspects import Suspicion


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


class Answer:
    """One answer of a request, from submission to its end."""

    __slots__ = (
        "_finished_told",
        "_logprobs",
        "_read",
        "_started_told",
        "finished",
        "index",
        "is_paused",
        "key",
        "started",
        "suspicion",
        "tokens",
    )

    def __init__(self, index: int, key: int) -> None:
        self.index = index
        self.key = key
        self.tokens = array("i")
        """All output tokens received so far."""
        self.started: AnswerStarted | None = None
        self.finished: AnswerFinished | None = None
        self.suspicion: Suspicion | None = None
        """None until a worker has died under it."""
        self.is_paused = False
        """The worker was told to halt it, since nobody reads."""
        self._read = 0
        self._logprobs: list[TokenLogprobs] = []
        self._started_told = False
        self._finished_told = False

    @property
    def unread(self) -> int:
        """Tokens received that no update has told of."""
        return len(self.tokens) - self._read

    @property
    def is_over(self) -> bool:
        return self.finished is not None

    def append(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        if self.suspicion is not None:
            self.suspicion.got_tokens(len(tokens))

    def add_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        self._logprobs += logprobs

    def take_update(self) -> AnswerUpdate:
        """All that is new, which is told now and never again."""
        update = AnswerUpdate(self.index, self.tokens[self._read :].tolist())
        self._read = len(self.tokens)
        if self._logprobs:
            update.logprobs, self._logprobs = self._logprobs, []
        if self.started is not None and not self._started_told:
            update.started, self._started_told = self.started, True
        if self.finished is not None and not self._finished_told:
            update.finished, self._finished_told = self.finished, True
        return update

    def output(self) -> IntArray | None:
        """The tokens received, for a resubmission; None if there are none."""
        return np.array(self.tokens, dtype=np.int32) if self.tokens else None

    def sampling(self, sampling: Sampling, *, has_prompt_logprobs: bool) -> Sampling:
        """The request's sampling as this answer alone needs it when submitted anew."""
        return replace(
            sampling,
            seed=answer_seed(sampling.seed, self.index),
            prompt_logprobs=None if has_prompt_logprobs or self.index else sampling.prompt_logprobs,
        )
