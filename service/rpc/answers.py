"""From a worker's updates to what a client is told: text, counts, finish reasons and timings per answer.

The tokens' way from ids to text goes through service.text; both servicers (this project's and the gateway's)
encode the same AnswerDelta. Knows no RPC and no message. Times are seconds of time.perf_counter.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import IntEnum

from service.rpc.validation import GenerateInput
from service.text import OutputText, TextTokenizer
from worker.client import AnswerUpdate, FinishReason, TokenLogprobs, Update


class Finish(IntEnum):
    """Why an answer ended; the numbers of slipstream.v1.FinishReason."""

    STOP = 1
    LENGTH = 2
    ABORTED = 3


_FINISH = {
    FinishReason.STOP_TOKEN: Finish.STOP,
    FinishReason.LENGTH: Finish.LENGTH,
    FinishReason.ABORTED: Finish.ABORTED,
}


@dataclass(frozen=True, slots=True)
class AnswerTimings:
    """Seconds since the request's arrival, as in slipstream.v1.Timings."""

    queue: float
    first_token: float
    total: float
    per_token: float
    preemptions: int


@dataclass(slots=True)
class AnswerDelta:
    """What is new about one answer. Counts are totals."""

    index: int
    text: str
    tokens: list[int]
    completion_tokens: int
    cached_tokens: int
    is_first: bool = False
    """First of its answer: an echoed prompt goes ahead of it."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish: Finish | None = None
    matched_stop: str | int | None = None
    timings: AnswerTimings | None = None


class Failure(Exception):
    """An answer cannot be completed; the whole request ends."""

    def __init__(self, reason: FinishReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Answers:
    """The n answers of one request."""

    def __init__(
        self, request: GenerateInput, tokenizer: TextTokenizer, arrival: float, needs_text: bool = True
    ) -> None:
        """`needs_text`: whether deltas carry text; without it, text is made only to find stop strings."""
        self._waits_for_prompt_logprobs = request.sampling.prompt_logprobs is not None
        self._prompt_logprobs: list[TokenLogprobs] | None = None
        makes_text = needs_text or request.stops is not None
        self._answers = [
            _Answer(i, request, tokenizer if makes_text else None, arrival) for i in range(request.n)
        ]
        self.failure: Failure | None = None
        """Set when an answer failed; the deltas of the update that said so are still right."""
        self.was_aborted = False
        self.submitted_at = arrival

    def take(self, update: Update) -> list[AnswerDelta]:
        """The deltas that an update brings, one for each answer with news."""
        if update.prompt_logprobs is not None:
            self._prompt_logprobs = update.prompt_logprobs
            self._waits_for_prompt_logprobs = False
        deltas = []
        for answer_update in update.answers:
            finished = answer_update.finished
            if finished is not None and finished.reason not in _FINISH:
                self.failure = Failure(finished.reason, finished.message)
            answer = self._answers[answer_update.index]
            delta = answer.take(answer_update, self.submitted_at)
            if delta.finish is Finish.ABORTED:
                self.was_aborted = True
            if answer.index == 0 and self._holds_back(delta):
                answer.is_first = True
                continue
            if answer.index == 0 and self._prompt_logprobs is not None:
                delta.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
            deltas.append(delta)
        return deltas

    def _holds_back(self, delta: AnswerDelta) -> bool:
        """The first message brings the prompt's log-probabilities, which are there with its first token."""
        return self._waits_for_prompt_logprobs and not delta.tokens and delta.finish is None


class _Answer:
    """One answer under way."""

    __slots__ = (
        "_arrival",
        "_cached_tokens",
        "_count",
        "_first_token_at",
        "_has_logprobs",
        "_last_token_at",
        "_queue_s",
        "_stop_token_ids",
        "_text",
        "index",
        "is_first",
    )

    def __init__(
        self, index: int, request: GenerateInput, tokenizer: TextTokenizer | None, arrival: float
    ) -> None:
        self.index = index
        self.is_first = True
        self._text: OutputText | None = None
        if tokenizer is not None:
            self._text = OutputText(
                tokenizer,
                request.stops,
                include_stop=request.include_stop,
                min_tokens=request.sampling.min_tokens,
            )
        self._stop_token_ids = request.stop_token_ids
        self._has_logprobs = request.sampling.logprobs is not None
        self._arrival = arrival
        self._count = 0
        self._cached_tokens = 0
        self._queue_s = 0.0
        self._first_token_at = 0.0
        self._last_token_at = 0.0

    def take(self, update: AnswerUpdate, submitted_at: float) -> AnswerDelta:
        if update.started is not None:
            self._cached_tokens = update.started.cached_tokens
            self._queue_s = submitted_at - self._arrival + update.started.queue_s
        tokens = update.tokens
        finished = update.finished
        stop_token = None
        if finished is not None and finished.reason is FinishReason.STOP_TOKEN and tokens:
            stop_token = tokens[-1]
        text, n_used, matched = self._push(tokens, stop_token, finished is not None)
        if n_used < len(tokens):
            tokens = tokens[:n_used]
        if tokens:
            self._last_token_at = time.perf_counter()
            if self._count == 0:
                self._first_token_at = self._last_token_at
            self._count += len(tokens)
        delta = AnswerDelta(
            self.index, text, tokens, self._count, self._cached_tokens, self.is_first,
            update.logprobs[:n_used] if self._has_logprobs else None,
        )  # fmt: skip
        self.is_first = False
        if matched is not None:
            delta.finish, delta.matched_stop = Finish.STOP, matched
        elif finished is not None:
            delta.finish = _FINISH.get(finished.reason)
            if stop_token in self._stop_token_ids:
                delta.matched_stop = stop_token
        if delta.finish is not None:
            delta.timings = self._timings(finished.preemptions if finished is not None else 0)
        return delta

    def _push(self, tokens: list[int], stop_token: int | None, is_over: bool) -> tuple[str, int, str | None]:
        """Text, how many of the tokens belong to the answer, and the stop string that ended it."""
        output = self._text
        if output is None:
            return "", len(tokens), None
        delta = output.push(tokens if stop_token is None else tokens[:-1])
        if delta.matched_stop is not None or not is_over:
            return delta.text, delta.n_tokens_used, delta.matched_stop
        rest = output.finish(stop_token)
        return delta.text + rest.text, len(tokens), rest.matched_stop

    def _timings(self, preemptions: int) -> AnswerTimings:
        has_tokens = self._count > 0
        gaps = self._count - 1
        return AnswerTimings(
            queue=self._queue_s,
            first_token=self._first_token_at - self._arrival if has_tokens else 0.0,
            total=(self._last_token_at if has_tokens else time.perf_counter()) - self._arrival,
            per_token=(self._last_token_at - self._first_token_at) / gaps if gaps > 0 else 0.0,
            preemptions=preemptions,
        )
