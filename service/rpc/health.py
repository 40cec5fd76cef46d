"""grpc.health.v1: Check, Watch and List, answered from a table that the front keeps up to date.

Never touches the work queue, so it answers however busy the workers are. Every change of a service's state
reaches its watchers, in order; a watcher that does not read delays nobody. Knows states, not what they mean:
health_states says that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.rpc.errors import Context, RpcError, invalid_field, quote

_Response: TypeAlias = health_pb2.HealthCheckResponse
_Status: TypeAlias = int

MAX_PENDING_CHANGES = 64
"""Changes kept for one watcher that reads slowly; the oldest go first."""

MAX_NAME_CHARACTERS = 1024
"""A watcher's request stays in memory, and anybody may watch: no service has so long a name."""


class _Watcher:
    """One Watch call: the changes it has yet to send."""

    __slots__ = ("changes", "is_over", "wake")

    def __init__(self, status: _Status) -> None:
        self.changes: deque[_Status] = deque([status], maxlen=MAX_PENDING_CHANGES)
        self.wake = asyncio.Event()
        self.wake.set()
        self.is_over = False


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Serves what update() last said. To be used from the server's event loop only."""

    def __init__(self, states: Mapping[str, bool]) -> None:
        """`states`: by service name, whether it is serving."""
        self._states: dict[str, _Status] = {name: _status(state) for name, state in states.items()}
        self._watchers: dict[str, set[_Watcher]] = {}
        self._is_over = False

    def update(self, states: Mapping[str, bool]) -> None:
        """Sets the state of these services and tells the watchers of those that changed. Never waits."""
        if self._is_over:
            return
        for name, state in states.items():
            status = _status(state)
            if self._states.get(name) == status:
                continue
            self._states[name] = status
            for watcher in self._watchers.get(name, ()):
                watcher.changes.append(status)
                watcher.wake.set()

    def close(self) -> None:
        """Everything is NOT_SERVING from now on; watchers are told, and their calls end."""
        self.update(dict.fromkeys(self._states, False))
        self._is_over = True
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.is_over = True
                watcher.wake.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> _Response:  # noqa: N802
        status = self._states.get(request.service)
        if status is None:
            message = f"no service {quote(request.service)}; Health.List names all"
            raise RpcError(grpc.StatusCode.NOT_FOUND, message)
        return _Response(status=status)

    async def List(  # noqa: N802
        self, request: health_pb2.HealthListRequest, context: Context
    ) -> health_pb2.HealthListResponse:
        statuses = {name: _Response(status=status) for name, status in self._states.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> None:
        name = request.service
        if len(name) > MAX_NAME_CHARACTERS:
            raise invalid_field("service", f"has {len(name)} characters; no service has so long a name")
        watcher = _Watcher(self._states.get(name, _Response.SERVICE_UNKNOWN))
        watcher.is_over = self._is_over
        self._watchers.setdefault(name, set()).add(watcher)
        try:
            while not watcher.is_over or watcher.changes:
                await watcher.wake.wait()
                watcher.wake.clear()
                while watcher.changes:
                    await context.write(_Response(status=watcher.changes.popleft()))
        finally:
            watchers = self._watchers[name]
            watchers.discard(watcher)
            if not watchers:
                del self._watchers[name]


def _status(is_serving: bool) -> _Status:
    return int(_Response.SERVING if is_serving else _Response.NOT_SERVING)
