"""Whether a request is taken, and how it becomes sequences."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np

from engine.interface import EngineCapacity, Sampling, pages_for
from worker.messages import Rejected, RejectReason, Submit, answer_seed
from worker.scheduling.news import FrontNews
from worker.scheduling.options import SchedulerOptions
from worker.scheduling.registry import Registry
from worker.sequence import Request, Sequence

_SHORTEST_RETRY_S = 0.1
_LONGEST_RETRY_S = 60.0
_FIRST_GUESS_S = 1.0
"""What a sequence is taken to last before any has ended."""
_SMOOTHING = 0.1


class Admission:
    """Applies the limits, in the order of what helps the client most to know."""

    def __init__(self, capacity: EngineCapacity, options: SchedulerOptions, registry: Registry) -> None:
        self.is_draining = False
        self._capacity = capacity
        self._max_queued = options.max_queued
        self._registry = registry
        self._arrivals = count()
        self._mean_run_s = _FIRST_GUESS_S

    def refusal(
        self, front: int, message: Submit, *, waiting: int, free_slots: int, now: float
    ) -> Rejected | None:
        """Why not, or None. Raises ValueError if the message breaks its own contract."""
        _check(message)
        return (
            self._refuse_length(message)
            or self._refuse_identity(front, message, now)
            or self._refuse_load(message, waiting, free_slots)
        )

    def make_request(self, news: FrontNews, message: Submit, now: float) -> Request:
        """The request with its answers, which are in no line yet."""
        request = Request(
            request_id=message.request_id,
            prompt=np.ascontiguousarray(message.prompt, np.int32),
            priority=message.priority,
            arrival=next(self._arrivals),
            cache_salt=message.cache_salt,
            submitted_at=now,
            deadline=None if message.time_left_s is None else now + message.time_left_s,
        )
        output = [] if message.output is None else [int(token) for token in message.output]
        for answer in range(message.n):
            sampling = _sampling_of(message.sampling, answer, has_output=bool(output))
            sequence = Sequence(
                request=request,
                key=message.key + answer,
                sampling=sampling,
                max_tokens=message.max_tokens,
                news=news,
                rank=(-message.priority, not message.is_resubmission, request.arrival, answer),
                output=output.copy(),
                prompt_logprobs=None if sampling.prompt_logprobs is None else [],
            )
            request.live.append(sequence)
        return request

    def note_run(self, seconds: float) -> None:
        """A sequence has ended, so long after its start."""
        self._mean_run_s += _SMOOTHING * (seconds - self._mean_run_s)

    def _refuse_length(self, message: Submit) -> Rejected | None:
        n_prompt, max_tokens = len(message.prompt), message.max_tokens
        length = n_prompt + max_tokens
        asked = f"{n_prompt} prompt tokens and max_tokens {max_tokens} make {length} tokens"
        if length > self._capacity.max_sequence_length:
            text = f"{asked}, but a sequence may have {self._capacity.max_sequence_length} at most"
            return Rejected(message.key, RejectReason.TOO_LONG, text)
        # The last token is never run, so it needs no place.
        if (pages := pages_for(length - 1)) > self._capacity.pages:
            text = f"{asked}, which need {pages} KV pages, but there are {self._capacity.pages} in all"
            return Rejected(message.key, RejectReason.TOO_LONG, text)
        return None

    def _refuse_identity(self, front: int, message: Submit, now: float) -> Rejected | None:
        request_id = message.request_id
        if self._registry.requests(request_id) and not message.is_resubmission:
            text = f'a request with id "{request_id}" is in flight'
            return Rejected(message.key, RejectReason.DUPLICATE_ID, text)
        for key in range(message.key, message.key + message.n):
            if self._registry.sequence(front, key) is not None:
                text = f"key {key} of this front is in use"
                return Rejected(message.key, RejectReason.DUPLICATE_ID, text)
        if self._registry.aborts.contains(request_id, now):
            text = f'request "{request_id}" was aborted before it arrived'
            return Rejected(message.key, RejectReason.ABORTED_BEFORE, text)
        return None

    def _refuse_load(self, message: Submit, waiting: int, free_slots: int) -> Rejected | None:
        if message.is_resubmission:
            return None
        if self.is_draining:
            text = "the worker is draining and takes no new requests"
            return Rejected(message.key, RejectReason.DRAINING, text)
        excess = waiting + message.n - free_slots - self._max_queued
        if excess <= 0 or len(self._registry) == 0:
            # An idle worker takes any request: one with more answers than the queue has places would
            # otherwise never be taken.
            return None
        retry_after_s = excess * self._mean_run_s / self._capacity.slots
        return Rejected(
            message.key,
            RejectReason.QUEUE_FULL,
            f"{waiting} sequences wait, of {self._max_queued} that may, and this request adds {message.n}",
            min(max(retry_after_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S),
        )


def _sampling_of(sampling: Sampling, answer: int, *, has_output: bool) -> Sampling:
    """Log-probabilities of the prompt go with the first token of answer 0, so a resubmission with output
    has delivered them."""
    wants_prompt = answer == 0 and not has_output
    return replace(
        sampling,
        seed=answer_seed(sampling.seed, answer),
        prompt_logprobs=sampling.prompt_logprobs if wants_prompt else None,
    )


def _check(message: Submit) -> None:
    if len(message.prompt) == 0:
        raise ValueError(f'request "{message.request_id}" has an empty prompt')
    if message.max_tokens < 1 or message.n < 1:
        raise ValueError(
            f'request "{message.request_id}" has max_tokens {message.max_tokens} and n {message.n}; '
            "both must be at least 1"
        )
    if message.output is not None and message.n != 1:
        raise ValueError(f'request "{message.request_id}" brings output, which goes with n = 1 only')
