"""One request as its servicer holds it: submit, read merged updates, close. Knows no socket and no worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.interface import IntArray, Sampling, TokenLogprobs
from worker.answers import Answer, AnswerFinished, AnswerStarted, AnswerUpdate
from worker.messages import FinishReason, RejectReason

__all__ = [
    "AnswerFinished",
    "AnswerStarted",
    "AnswerUpdate",
    "Generation",
    "GenerationRequest",
    "Rejection",
    "Update",
]


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


@dataclass(slots=True)
class Update:
    """What is new about a request since the last update: only answers with news."""

    answers: list[AnswerUpdate]
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Whole, once, where asked for: for prompt tokens 1 … n−1."""


class GenerationOwner(Protocol):
    """The pool, as a generation needs it."""

    def cancel(self, generation: Generation, answers: list[Answer]) -> None:
        """Nobody wants these any more."""

    def resume(self, generation: Generation, answer: Answer) -> None:
        """What had gathered of a paused answer was read."""

    def forget(self, generation: Generation) -> None:
        """The request is closed."""


class Generation:
    """A request under way. Made by WorkerPool.submit(); used from the pool's event loop by one task."""

    def __init__(self, request: GenerationRequest, first_key: int, owner: GenerationOwner) -> None:
        self.request = request
        self.prompt: IntArray = np.ascontiguousarray(request.prompt, dtype=np.int32)
        self.answers = [Answer(index, first_key + index) for index in range(request.n)]
        self.deadline: float | None = None
        """By the event loop's clock."""
        self.tried: set[int] = set()
        """Workers that had no room for it."""
        self.was_resubmitted = False
        self.has_prompt_logprobs = False
        self._owner = owner
        self._news: dict[Answer, None] = {}
        self._prompt_logprobs: list[TokenLogprobs] | None = None
        self._rejection: Rejection | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False

    def time_left_s(self) -> float | None:
        """Until its deadline, at least 0; None without one."""
        if self.deadline is None:
            return None
        return max(0.0, self.deadline - asyncio.get_running_loop().time())

    # ---- for servicers

    async def next(self) -> Update | None:
        """Waits for news and returns all of it, merged; None when every answer is over and was reported.

        Raises Rejection (before any update) if no worker admitted the request.
        """
        while not self._news:
            if self._rejection is not None:
                raise self._rejection
            if self._is_closed or all(answer.is_over for answer in self.answers):
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        news, self._news = self._news, {}
        update = Update([answer.take_update() for answer in news], self._prompt_logprobs)
        self._prompt_logprobs = None
        for answer in news:
            if answer.is_paused and not answer.is_over:
                self._owner.resume(self, answer)
        return update

    def finish(self, index: int) -> None:
        """The caller wants no more of this answer (a stop string came): it counts as over at once and no
        update speaks of it again. Idempotent."""
        answer = self.answers[index]
        self._news.pop(answer, None)
        if not answer.is_over:
            answer.finished = AnswerFinished(FinishReason.CANCELLED)
            self._owner.cancel(self, [answer])

    def close(self) -> None:
        """Cancels what remains. To be called in `finally`. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._news.clear()
        remaining = [answer for answer in self.answers if not answer.is_over]
        for answer in remaining:
            answer.finished = AnswerFinished(FinishReason.CANCELLED)
        if remaining:
            self._owner.cancel(self, remaining)
        self._owner.forget(self)
        self._wake()

    # ---- for the pool

    def notify(self, answer: Answer) -> None:
        """There is news about `answer`."""
        self._news[answer] = None
        self._wake()

    def set_prompt_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        if not self.has_prompt_logprobs:
            self._prompt_logprobs = logprobs
            self.has_prompt_logprobs = True

    def end(self, answer: Answer, finished: AnswerFinished) -> None:
        answer.finished = finished
        self.notify(answer)

    def reject(self, rejection: Rejection) -> None:
        self._rejection = rejection
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)
