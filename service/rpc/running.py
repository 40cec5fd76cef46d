"""One request's run: submit, take updates until every answer is over, always close. Both façades use it.

Says with which gRPC status each way of ending ends. Knows no message.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import grpc
import structlog

from service.front_instruments import FrontInstruments
from service.rpc.answers import AnswerDelta, Answers, AnswerTimings, Failure, Finish
from service.rpc.errors import Context, RpcError, invalid_field, retry_later
from service.rpc.serving import ServedModel, Serving
from service.rpc.validation import GenerateInput
from worker.client import FinishReason, GenerationRequest, Rejection, RejectReason

log = structlog.get_logger(__name__)

Deliver = Callable[[AnswerDelta], Awaitable[None]]

NO_WORKER_RETRY_S = 1.0

_METRIC_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORTED: "abort"}


async def run_request(
    serving: Serving,
    model: ServedModel,
    request: GenerateInput,
    context: Context,
    arrival: float,
    deliver: Deliver,
    needs_text: bool = True,
) -> None:
    """Runs the request and awaits `deliver(delta)` for all that comes; what comes meanwhile is merged into
    the next delta. Returns when every answer is whole; raises RpcError if any is not.

    `arrival`: time.perf_counter() when the call came. Whatever happens, and if the call is cancelled
    (a client that went away), the worker is told at once that nobody listens any more.
    """
    answers = Answers(request, model.tokenizer, arrival, needs_text)
    try:
        answers.submitted_at = time.perf_counter()
        generation = await serving.pool.submit(_generation_request(request, context.time_remaining()))
    except Rejection as rejection:
        raise rejected(rejection, request) from rejection
    try:
        while (update := await generation.next()) is not None:
            for delta in answers.take(update):
                if delta.finish is not None:
                    generation.finish(delta.index)
                    _record(serving.metrics, request, delta)
                await deliver(delta)
            if answers.failure is not None:
                raise failed(answers.failure, request)
    except Rejection as rejection:
        if rejection.reason is RejectReason.ABORTED_BEFORE:
            await _deliver_aborted(request, arrival, deliver)
        raise rejected(rejection, request) from rejection
    finally:
        generation.close()
    log.debug(
        "request_done",
        request_id=request.request_id,
        prompt_tokens=len(request.prompt.ids),
        answers=request.n,
        aborted=answers.was_aborted,
        seconds=round(time.perf_counter() - arrival, 4),
    )
    if answers.was_aborted:
        raise RpcError(grpc.StatusCode.CANCELLED, f"request {request.request_id!r} was aborted")


def _record(metrics: FrontInstruments, request: GenerateInput, delta: AnswerDelta) -> None:
    """An answer is whole: what its client saw."""
    assert delta.finish is not None
    assert delta.timings is not None
    metrics.answered(
        len(request.prompt.ids),
        delta.completion_tokens,
        _METRIC_REASONS[delta.finish],
        delta.timings.first_token,
        delta.timings.total,
    )


def _generation_request(request: GenerateInput, time_left_s: float | None) -> GenerationRequest:
    return GenerationRequest(
        request_id=request.request_id,
        prompt=request.prompt.ids,
        sampling=request.sampling,
        max_tokens=request.max_tokens,
        n=request.n,
        priority=request.priority,
        cache_salt=request.cache_salt,
        time_left_s=time_left_s,
    )


async def _deliver_aborted(request: GenerateInput, arrival: float, deliver: Deliver) -> None:
    """Final messages of a request whose id was aborted before it came."""
    for index in range(request.n):
        timings = AnswerTimings(0.0, 0.0, time.perf_counter() - arrival, 0.0, 0)
        await deliver(AnswerDelta(index, "", [], 0, 0, finish=Finish.ABORTED, timings=timings))


def rejected(rejection: Rejection, request: GenerateInput) -> RpcError:
    """The status of a request that was not admitted."""
    message, retry_after_s = rejection.message, rejection.retry_after_s
    match rejection.reason:
        case RejectReason.QUEUE_FULL:
            return retry_later(grpc.StatusCode.RESOURCE_EXHAUSTED, message, retry_after_s)
        case RejectReason.DUPLICATE_ID:
            return RpcError(grpc.StatusCode.ALREADY_EXISTS, message)
        case RejectReason.ABORTED_BEFORE:
            message = f"request {request.request_id!r} was aborted before it came"
            return RpcError(grpc.StatusCode.CANCELLED, message)
        case RejectReason.NO_WORKER:
            return retry_later(grpc.StatusCode.UNAVAILABLE, message, retry_after_s or NO_WORKER_RETRY_S)
        case RejectReason.DRAINING:
            return retry_later(grpc.StatusCode.UNAVAILABLE, message, retry_after_s)
        case RejectReason.TOO_LONG:
            return invalid_field(request.prompt.field, message)


def failed(failure: Failure, request: GenerateInput) -> RpcError:
    """The status of a request that ended before its answers were whole."""
    match failure.reason:
        case FinishReason.DEADLINE:
            message = "the deadline passed before the answer was whole"
            return RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, message)
        case FinishReason.CANCELLED:
            return RpcError(grpc.StatusCode.CANCELLED, failure.message or "the request was cancelled")
        case _:
            log.warning("request_failed", request_id=request.request_id, error=failure.message)
            return RpcError(grpc.StatusCode.INTERNAL, failure.message or "the engine failed on this request")
