"""grpc.health.v1 over a real server: states, changes, and answers however busy the rest is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from protos.slipstream.v1 import control_pb2, inference_pb2
from service.rpc.health import MAX_PENDING_CHANGES, HealthServicer
from service.rpc.health_states import Condition, health_states
from tests.unit.rpc_harness import error_of, rpc_server, run
from worker.client import Rejection, RejectReason

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def ask(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


LOADING = Condition((False, False))
SERVES = Condition((True, True))
DEGRADED = Condition((True, False))
DRAINING = Condition((True, True), is_draining=True)
FULL = Condition((True, True), queue_has_room=False)


@pytest.mark.parametrize(
    ("name", "loading", "serving", "degraded", "draining", "full"),
    [
        ("", 0, 1, 1, 0, 1),
        ("slipstream.v1.Inference", 0, 1, 1, 0, 1),
        ("vllm.grpc.engine.VllmEngine", 0, 1, 1, 0, 1),
        ("readiness", 0, 1, 1, 0, 0),
        ("loaded", 0, 1, 1, 1, 1),
        ("admitting", 1, 1, 1, 0, 1),
        ("complete", 0, 1, 0, 1, 1),
        ("liveness", 1, 1, 1, 1, 1),
        ("slipstream.v1.Control", 1, 1, 1, 1, 1),
        ("worker/0", 0, 1, 1, 1, 1),
        ("worker/1", 0, 1, 0, 1, 1),
    ],
)
def test_what_each_name_says(
    name: str, loading: int, serving: int, degraded: int, draining: int, full: int
) -> None:
    states = [health_states(c)[name] for c in (LOADING, SERVES, DEGRADED, DRAINING, FULL)]
    assert states == [bool(state) for state in (loading, serving, degraded, draining, full)]


def test_watch_sees_loading_serving_and_draining(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint, is_loaded=False) as harness:
            watch = harness.health.Watch(ask("slipstream.v1.Inference"))
            assert (await watch.read()).status == NOT_SERVING
            harness.serving.set_workers([True], True)
            assert (await watch.read()).status == SERVING
            harness.serving.set_workers([True], True)  # no change, no message
            await harness.operations.Drain(control_pb2.DrainRequest())
            assert (await watch.read()).status == NOT_SERVING
            assert (await harness.health.Check(ask(""))).status == NOT_SERVING
            assert (await harness.health.Check(ask("liveness"))).status == SERVING

    run(scenario())


def test_every_change_reaches_every_watcher_in_order(tiny_checkpoint: Path) -> None:
    """Changes come faster than they can be sent."""

    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint, is_loaded=False) as harness:
            watches = [harness.health.Watch(ask("worker/0")) for _ in range(3)]
            for watch in watches:
                assert (await watch.read()).status == NOT_SERVING
            for _ in range(10):
                harness.serving.set_workers([True], True)
                harness.serving.set_workers([False], True)
            for watch in watches:
                seen = [(await watch.read()).status for _ in range(20)]
                assert seen == [SERVING, NOT_SERVING] * 10

    run(scenario())


def test_an_unknown_service(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            error = await error_of(harness.health.Check(ask("nobody")))
            assert error.code() == grpc.StatusCode.NOT_FOUND
            watch = harness.health.Watch(ask("nobody"))
            assert (await watch.read()).status == UNKNOWN
            # The call goes on, in case the service appears; asking for a known one works meanwhile.
            assert (await harness.health.Check(ask(""))).status == SERVING
            watch.cancel()

    run(scenario())


def test_list_names_all_services(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            reply = await harness.health.List(health_pb2.HealthListRequest())
            assert {name: one.status == SERVING for name, one in reply.statuses.items()} == health_states(
                harness.serving.condition
            )

    run(scenario())


def test_health_answers_while_the_queue_is_full_and_streams_are_open(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            streams = [
                harness.inference.Generate(inference_pb2.GenerateRequest(text="hello")) for _ in range(300)
            ]
            await harness.pool.submitted(300)
            harness.pool.refuse = Rejection(RejectReason.QUEUE_FULL, "full", 1.0)
            harness.serving.set_workers([True], False)
            error = await error_of(harness.inference.Complete(inference_pb2.GenerateRequest(text="hello")))
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            for service, status in (("", SERVING), ("readiness", NOT_SERVING), ("liveness", SERVING)):
                assert (await harness.health.Check(ask(service), timeout=5)).status == status
            for stream in streams:
                stream.cancel()

    run(scenario())


def test_watchers_are_told_of_the_end_and_released(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            watch = harness.health.Watch(ask(""))
            assert (await watch.read()).status == SERVING
            stopping = asyncio.ensure_future(harness.server.stop(10))
            assert (await watch.read()).status == NOT_SERVING
            assert await watch.read() is grpc.aio.EOF
            await stopping

    run(scenario())


def test_a_watcher_that_does_not_read_delays_nobody() -> None:
    """Its changes are bounded, the latest kept; update() never waits."""

    class StalledContext:
        def __init__(self) -> None:
            self.written: list[int] = []
            self.may_write = asyncio.Event()

        async def write(self, message: health_pb2.HealthCheckResponse) -> None:
            await self.may_write.wait()
            self.written.append(message.status)

    async def scenario() -> list[int]:
        health = HealthServicer({"": False})
        context = StalledContext()
        watch = asyncio.ensure_future(health.Watch(ask(""), context))
        await asyncio.sleep(0)
        for i in range(1001):
            health.update({"": i % 2 == 0})
        context.may_write.set()
        health.close()
        await watch
        return context.written

    written = run(scenario())
    assert len(written) <= MAX_PENDING_CHANGES + 1
    assert written[-2:] == [SERVING, NOT_SERVING]


def test_a_watcher_that_goes_away_is_forgotten(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            watchers = harness.server._health._watchers
            watch = harness.health.Watch(ask(""))
            await watch.read()
            assert len(watchers[""]) == 1
            watch.cancel()
            while watchers:
                await asyncio.sleep(0.001)

    run(scenario())


def test_a_name_that_no_service_has_is_not_kept_in_memory(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            watch = harness.health.Watch(ask("n" * 100_000))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await watch.read()
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "service: has 100000 characters" in (caught.value.details() or "")

    run(scenario())
