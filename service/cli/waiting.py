"""Waiting for a server by its health service, not by guessing times."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.cli.connection import Connection


def wait_until_serving(connection: Connection, service: str, timeout_s: float) -> str:
    """The service's health ("SERVING", "NOT_SERVING", …), as soon as it serves or at the deadline.

    With no time to wait, one Check, which raises grpc.RpcError if no server answers. With time, an
    absent server is waited for as well, and UNREACHABLE is what is said if none appeared.
    """
    import grpc
    from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
    from grpc_health.v1.health_pb2_grpc import HealthStub

    name = HealthCheckResponse.ServingStatus.Name
    request = HealthCheckRequest(service=service)
    deadline = time.monotonic() + timeout_s
    state = "UNREACHABLE"
    with connection.open() as channel:
        stub = HealthStub(channel)
        if timeout_s <= 0:
            return str(name(stub.Check(request, timeout=10, metadata=connection.metadata()).status))
        while (left := deadline - time.monotonic()) > 0:
            watch = stub.Watch(request, timeout=left, wait_for_ready=True, metadata=connection.metadata())
            try:
                for message in watch:
                    state = str(name(message.status))
                    if state == "SERVING":
                        watch.cancel()
                        return state
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:  # the server went away: wait for another
                    state = "UNREACHABLE"
                elif error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
    return state
