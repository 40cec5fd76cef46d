"""What holds for every call, whatever its method: it is counted, what its request takes in memory is bounded,
and bytes that are no protobuf message are INVALID_ARGUMENT, as any other bad input is (gRPC itself would say
INTERNAL, as if the server were at fault, and log a traceback for each)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from service.front_instruments import FrontInstruments
from service.rpc.errors import Context, RpcError, StatusOnError, retry_later

MAX_HELD_BYTES = 512 * 2**20
"""gRPC holds a request, as bytes and as a message, until its call is over, however long that runs. So large
requests under way share a limit; small ones pass always: status and health answer at any time."""
SMALL_BYTES = 4096
HELD_RETRY_S = 1.0
DEADLINE_ROUNDING_S = 0.02

MALFORMED_MESSAGE = "the request is no valid message of this method's type, or holds invalid UTF-8"


class _Malformed:
    """Stands in for a request that could not be decoded."""


_MALFORMED = _Malformed()


@dataclass(frozen=True, slots=True)
class _Received:
    """A request and its size on the wire."""

    message: Any
    size: int


class HeldRequests:
    """The bytes of the large requests under way. Used from the server's event loop only."""

    def __init__(self) -> None:
        self._bytes = 0

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Raises RpcError RESOURCE_EXHAUSTED if that would be too much together."""
        if size <= SMALL_BYTES:
            yield
            return
        if self._bytes + size > MAX_HELD_BYTES:
            message = "the large requests under way take too much memory"
            raise retry_later(grpc.StatusCode.RESOURCE_EXHAUSTED, message, HELD_RETRY_S)
        self._bytes += size
        try:
            yield
        finally:
            self._bytes -= size


_CODE_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}


class CallBoundary(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps the handlers of all methods with a single request. To come last among interceptors: what it has
    wrapped once, it answers with from then on."""

    def __init__(self, metrics: FrontInstruments) -> None:
        self._metrics = metrics
        self._held = HeldRequests()
        self._wrapped: dict[str, grpc.RpcMethodHandler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is not None:
            return wrapped
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        wrapped = self._wrapped[method] = _wrap(handler, method.removeprefix("/"), self._metrics, self._held)
        return wrapped


def _wrap(
    handler: grpc.RpcMethodHandler, method: str, metrics: FrontInstruments, held: HeldRequests
) -> grpc.RpcMethodHandler:
    """All our handlers are coroutines; streams are written through the context."""
    behavior = handler.unary_stream if handler.response_streaming else handler.unary_unary
    deserialize = handler.request_deserializer

    def deserialize_or_mark(data: bytes) -> _Received:
        try:
            return _Received(deserialize(data), len(data))
        except DecodeError:
            return _Received(_MALFORMED, len(data))

    async def handle(request: _Received, context: Context) -> Any:
        started = time.perf_counter()
        metrics.rpc_started()
        code = "UNKNOWN"
        try:
            async with StatusOnError(context, method):
                with held.hold(request.size):
                    if request.message is _MALFORMED:
                        raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, MALFORMED_MESSAGE)
                    result = await behavior(request.message, context)
            code = "OK"
            return result
        except asyncio.CancelledError:
            code = "DEADLINE_EXCEEDED" if _is_late(context) else "CANCELLED"
            raise
        except grpc.aio.AbortError:
            code = _code_name(context.code())
            raise
        finally:
            metrics.rpc_ended(method, code, time.perf_counter() - started)

    make = (
        grpc.unary_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return make(handle, deserialize_or_mark, handler.response_serializer)


def _is_late(context: Context) -> bool:
    """Whether the call's deadline is what cancelled it: the client's own clock may say so a little earlier,
    since a deadline is rounded up on its way here."""
    remaining = context.time_remaining()
    return remaining is not None and remaining <= DEADLINE_ROUNDING_S


def _code_name(code: grpc.StatusCode | int) -> str:
    """grpc.aio's contexts hold either."""
    number: int = code.value[0] if isinstance(code, grpc.StatusCode) else code
    return _CODE_NAMES.get(number, "UNKNOWN")
