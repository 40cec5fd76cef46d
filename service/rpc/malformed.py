"""Requests whose bytes are no protobuf message: INVALID_ARGUMENT, as for any other bad input.

gRPC itself would say INTERNAL, as if the server were at fault, and log a traceback for each.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from service.rpc.errors import Context


class _Malformed:
    """Stands in for a request that could not be decoded."""


_MALFORMED = _Malformed()


class MalformedRequests(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps the handlers of all methods with a single request. To come last among interceptors: what it has
    wrapped once, it answers with from then on."""

    def __init__(self) -> None:
        self._wrapped: dict[str, grpc.RpcMethodHandler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        wrapped = self._wrapped.get(handler_call_details.method)
        if wrapped is not None:
            return wrapped
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        wrapped = self._wrapped[handler_call_details.method] = _wrap(handler)
        return wrapped


def _wrap(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """All our handlers are coroutines; streams are written through the context."""
    behavior = handler.unary_stream if handler.response_streaming else handler.unary_unary
    deserialize = handler.request_deserializer

    def deserialize_or_mark(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _MALFORMED

    async def refuse_or_handle(request: Any, context: Context) -> Any:
        if request is _MALFORMED:
            message = "the request is no valid message of this method's type, or holds invalid UTF-8"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        return await behavior(request, context)

    make = (
        grpc.unary_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return make(refuse_or_handle, deserialize_or_mark, handler.response_serializer)
