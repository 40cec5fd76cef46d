"""Tells an observer of every call, by method and status, and knows how many requests are under way.

One wrapper a call, none a message. What is done with it is the observer's.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import grpc

from service.rpc.errors import Context

# Calls that a drain waits for.
_REQUESTS = frozenset(
    {
        "slipstream.v1.Inference/Generate",
        "slipstream.v1.Inference/Complete",
        "vllm.grpc.engine.VllmEngine/Generate",
        "vllm.grpc.engine.VllmEngine/Embed",
    }
)

# Made-up method names must not make ever more time series.
_MAX_METHODS = 64


class RpcObserver(Protocol):
    """What is told of calls, on the event loop."""

    def rpc_started(self) -> None: ...

    def rpc_ended(self, method: str, code: str, duration_s: float) -> None:
        """`method` as service/Method; `code` is the status's name."""
        ...


class ObserveRpcs(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """To come first among interceptors, so that what the others refuse is seen too."""

    def __init__(self, observer: RpcObserver, on_request_over: Callable[[], None] = lambda: None) -> None:
        """`on_request_over` is called after each request for tokens."""
        self._observer = observer
        self._on_request_over = on_request_over
        self._wrapped: dict[tuple[str, int], tuple[grpc.RpcMethodHandler, grpc.RpcMethodHandler]] = {}
        self.requests_open = 0
        """Requests for tokens under way, those still being validated included."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        method = handler_call_details.method.removeprefix("/")
        known = self._wrapped.get((method, id(handler)))
        if known is not None:
            return known[1]
        if len(self._wrapped) >= _MAX_METHODS:
            return self._wrap(handler, "other")
        wrapped = self._wrap(handler, method)
        # The handler is kept as well, so that its id stays its own.
        self._wrapped[method, id(handler)] = (handler, wrapped)
        return wrapped

    def _wrap(self, handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
        behavior = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def call(request: Any, context: Context) -> Any:
            with self._observing(method, context):
                return await behavior(request, context)

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            with self._observing(method, context):
                async for message in behavior(request, context):
                    yield message

        make = grpc.unary_unary_rpc_method_handler
        if handler.response_streaming:
            make = grpc.unary_stream_rpc_method_handler
        observed = stream if inspect.isasyncgenfunction(behavior) else call
        return make(observed, handler.request_deserializer, handler.response_serializer)

    @contextmanager
    def _observing(self, method: str, context: Context) -> Iterator[None]:
        started = time.perf_counter()
        is_request = method in _REQUESTS
        self.requests_open += is_request
        self._observer.rpc_started()
        code = "UNKNOWN"
        try:
            yield
            code = "OK"
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        except grpc.aio.AbortError:
            code = _status_name(context.code())
            raise
        finally:
            self._observer.rpc_ended(method, code, time.perf_counter() - started)
            self.requests_open -= is_request
            if is_request:
                self._on_request_over()


_STATUS_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


def _status_name(code: Any) -> str:
    """grpc.aio says a status as grpc.StatusCode or as its number."""
    return code.name if isinstance(code, grpc.StatusCode) else _STATUS_NAMES.get(code, "UNKNOWN")
