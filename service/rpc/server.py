"""Builds a front's gRPC server out of the servicers, and runs it. What each does stands in its own file."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from protos.slipstream.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from service.rpc.control import ControlServicer, ServerControl
from service.rpc.health import HealthServicer
from service.rpc.health_states import health_states
from service.rpc.inference import InferenceServicer
from service.rpc.interception import CallBoundary
from service.rpc.security import BearerAuth, TlsFiles, server_credentials
from service.rpc.serving import Serving
from service.rpc.vllm_facade import VllmEngineServicer

MAX_REQUEST_BYTES = 32 * 2**20
MAX_PENDING_CALLS = 65_536

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 1),
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    # An answer is as long as it is; the client's own limit decides what it takes.
    ("grpc.max_send_message_length", -1),
    # Calls open at once per connection; those beyond wait in the client. A guard against one connection
    # holding thousands of handlers, not admission: the workers' queues do that, and say so.
    ("grpc.max_concurrent_streams", 4096),
    # Calls that have come and that the event loop has not yet taken: gRPC would cancel some beyond 1,000 and
    # all beyond 3,000, which a burst reaches, and with a status that tells the client nothing.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    # Clients and proxies may ping as often as ten times a second, with or without calls. Without these, a
    # client that pings every 2 s loses its connection (GOAWAY, too_many_pings) after some 11 s.
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.keepalive_permit_without_calls", 1),
    # We ping, too: a client whose machine vanished holds its slots for 40 s at most.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


@dataclass(frozen=True, slots=True)
class RpcOptions:
    """How a front's gRPC server is set up."""

    reflection: bool = True
    tls: TlsFiles | None = None
    tokens: tuple[str, ...] = ()
    """Bearer tokens, one of which every call must bring; none: open to all."""
    shares_port: bool = True
    """Whether other processes may listen on the same port (SO_REUSEPORT)."""


DEFAULT_OPTIONS = RpcOptions()


class RpcServer:
    """One front's gRPC server: start, keep its health up to date, drain, stop."""

    def __init__(
        self, serving: Serving, control: ServerControl, options: RpcOptions = DEFAULT_OPTIONS
    ) -> None:
        """Health follows `serving` from now on. Call inside the running event loop."""
        self.serving = serving
        self._options = options
        self._health = HealthServicer(health_states(serving.condition))
        serving.on_change = self._refresh_health
        interceptors: list[grpc.aio.ServerInterceptor] = [CallBoundary(serving.metrics)]
        if options.tokens:
            interceptors.insert(0, BearerAuth(options.tokens))
        settings = dict(SERVER_OPTIONS) | {"grpc.so_reuseport": int(options.shares_port)}
        self._server = grpc.aio.server(interceptors=interceptors, options=list(settings.items()))
        inference_pb2_grpc.add_InferenceServicer_to_server(  # type: ignore[no-untyped-call]
            InferenceServicer(serving), self._server
        )
        control_pb2_grpc.add_ControlServicer_to_server(  # type: ignore[no-untyped-call]
            ControlServicer(serving, control), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(
            VllmEngineServicer(serving, control), self._server
        )
        if options.reflection:
            reflection.enable_server_reflection(_service_names(), self._server)

    async def start(self, address: str) -> int:
        """Listens on host:port (port 0: a free one) and returns the port. Raises RuntimeError if the address
        cannot be had, OSError if a PEM file cannot be read."""
        if self._options.tls is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, server_credentials(self._options.tls))
        await self._server.start()
        return int(port)

    async def stop(self, grace_s: float | None) -> None:
        """Takes no new connections, waits for running calls, and cancels those that are left after
        `grace_s`. Idempotent."""
        self._health.close()
        await self._server.stop(grace_s)
        self.serving.close()

    def _refresh_health(self) -> None:
        self._health.update(health_states(self.serving.condition))


def _service_names() -> tuple[str, ...]:
    services = [
        descriptor.services_by_name[name].full_name
        for descriptor, name in (
            (inference_pb2.DESCRIPTOR, "Inference"),
            (control_pb2.DESCRIPTOR, "Control"),
            (health_pb2.DESCRIPTOR, "Health"),
            (vllm_engine_pb2.DESCRIPTOR, "VllmEngine"),
        )
    ]
    return (*services, reflection.SERVICE_NAME)
