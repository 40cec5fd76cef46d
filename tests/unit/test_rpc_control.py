"""Control over a scripted pool and server."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from protos.slipstream.v1 import control_pb2 as pb
from protos.slipstream.v1 import inference_pb2
from service.rpc.control import MetricsSnapshot
from tests.unit.rpc_harness import CAPACITY, INFO, Harness, error_of, rpc_server, run, violations_of
from worker.client import (
    HistogramData,
    MetricData,
    Rejection,
    RejectReason,
    Status,
    WorkerReport,
    WorkerState,
    WorkerView,
)


def view(index: int, state: WorkerState) -> WorkerView:
    report = WorkerReport(
        index=index, state=state, pid=100 + index, restarts=2, load_stage="weights", load_progress=0.5,
        last_error="killed", info=INFO, capacity=CAPACITY,
    )  # fmt: skip
    status = Status(
        ticket=1, running=3, waiting=4, paused=1, slots=4, pages=64, pages_free=10, pages_cached=5, steps=99,
        preemptions=7, is_draining=False, metrics=[],
    )  # fmt: skip
    return WorkerView(report, status if state is WorkerState.READY else None)


READY, LOADING, RESTARTING = WorkerState.READY, WorkerState.LOADING, WorkerState.RESTARTING


@pytest.mark.parametrize(
    ("workers", "state"),
    [
        ([LOADING, LOADING], pb.SERVER_STATE_LOADING),
        ([READY, READY], pb.SERVER_STATE_SERVING),
        ([READY, RESTARTING], pb.SERVER_STATE_DEGRADED),
        ([], pb.SERVER_STATE_LOADING),
    ],
)
def test_status_at_any_time(tiny_checkpoint: Path, workers: list[WorkerState], state: int) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint, is_loaded=False) as harness:
            harness.pool.views = [view(i, one) for i, one in enumerate(workers)]
            reply = await harness.operations.GetStatus(pb.GetStatusRequest())
            # Whatever the workers say: requests are refused until this front has the model's tokenizer.
            assert reply.state == pb.SERVER_STATE_LOADING
            harness.serving.set_workers([one is READY for one in workers], True)
            reply = await harness.operations.GetStatus(pb.GetStatusRequest())
            assert reply.state == state
            assert (reply.version, reply.uptime_seconds, reply.fronts, reply.front) == ("1.2.3", 5.0, 2, 1)
            assert [worker.state for worker in reply.workers] == [int(one) for one in workers]
            if workers == [READY, RESTARTING]:
                first, second = reply.workers
                assert (first.running, first.waiting, first.paused, first.steps) == (3, 4, 1, 99)
                assert (first.pages, first.pages_free, first.pages_cached, first.slots) == (64, 10, 5, 4)
                assert (first.pid, first.restarts, first.load_stage, first.last_error) == (
                    100, 2, "weights", "killed",
                )  # fmt: skip
                assert (second.running, second.engine) == (0, "simulated")
                assert (first.weight_dtype, first.kv_dtype) == (INFO.weight_dtype, INFO.kv_dtype)
                assert second.pages_free == 0, "a worker that does not run has nothing to give"
                assert dict(reply.versions) == {"grpcio": "1", "numpy": "2"}

    run(scenario())


def test_the_states_have_the_protocols_numbers() -> None:
    for state in WorkerState:
        assert pb.WorkerState.Name(int(state)) == f"WORKER_STATE_{state.name}"


def test_drain_stops_admission_and_counts_what_runs(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            call = harness.inference.Generate(inference_pb2.GenerateRequest(text="hello"))
            await harness.pool.submitted()
            reply = await harness.operations.Drain(
                pb.DrainRequest(timeout=Duration(seconds=3, nanos=500_000_000))
            )
            assert reply.remaining == 1
            await harness.operations.Drain(pb.DrainRequest())
            assert harness.control.drained_with == [3.5, None]
            status = await harness.operations.GetStatus(pb.GetStatusRequest())
            assert (status.state, status.open_streams) == (pb.SERVER_STATE_DRAINING, 1)
            call.cancel()

    run(scenario())


def test_metrics_typed_and_as_text(tiny_checkpoint: Path) -> None:
    histogram = HistogramData((0.1, math.inf), (3, 1), 2.5)

    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            harness.control.snapshot = MetricsSnapshot(
                [
                    MetricData("slipstream:requests", "counter", "Requests.", (("worker", "0"),), 5.0),
                    MetricData("slipstream:latency", "histogram", "Latency.", histogram=histogram),
                ],
                "text",
            )
            reply = await harness.operations.GetMetrics(pb.GetMetricsRequest())
            assert reply.prometheus_text == "text"
            counter, latency = reply.metrics
            assert (counter.name, counter.kind, counter.value) == (
                "slipstream:requests",
                pb.Metric.KIND_COUNTER,
                5.0,
            )
            assert dict(counter.labels) == {"worker": "0"}
            assert (list(latency.histogram.bounds), list(latency.histogram.counts)) == (
                [0.1, math.inf],
                [3, 1],
            )

    run(scenario())


def test_profile(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            reply = await harness.operations.Profile(pb.ProfileRequest())
            assert (reply.steps, reply.stages[0].stage, reply.stages[0].total) == (32, "execute", 30.0)
            reply = await harness.operations.Profile(pb.ProfileRequest(steps=5, timeout=Duration(seconds=2)))
            assert (reply.steps, reply.stages[0].total) == (5, 2.0)
            harness.pool.refuse = Rejection(RejectReason.NO_WORKER, "gone")
            error = await error_of(harness.operations.Profile(pb.ProfileRequest()))
            assert error.code() == grpc.StatusCode.UNAVAILABLE

    run(scenario())


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.ProfileRequest(steps=0), "steps"),
        (pb.ProfileRequest(steps=10_001), "steps"),
        (pb.ProfileRequest(worker=1), "worker"),
        (pb.ProfileRequest(worker=2**32 - 1), "worker"),
        (pb.ProfileRequest(timeout=Duration(seconds=0)), "timeout"),
        (pb.ProfileRequest(timeout=Duration(seconds=-5)), "timeout"),
        (pb.ProfileRequest(timeout=Duration(seconds=2**62)), "timeout"),
        (pb.DrainRequest(timeout=Duration(seconds=-1)), "timeout"),
        (pb.DrainRequest(timeout=Duration(seconds=2**62)), "timeout"),
    ],
)
def test_bad_values_are_named(
    tiny_checkpoint: Path, request_: pb.ProfileRequest | pb.DrainRequest, field: str
) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            method = harness.operations.Profile
            if isinstance(request_, pb.DrainRequest):
                method = harness.operations.Drain
            assert violations_of(await error_of(method(request_))).keys() == {field}
            assert harness.control.drained_with == []
            assert not harness.serving.condition.is_draining

    run(scenario())


def counts_of(harness: Harness) -> dict[tuple[str, ...], float]:
    return {
        tuple(value for _, value in metric.labels): metric.value
        for metric in harness.serving.metrics.export()
        if metric.name == "slipstream:rpcs"
    }


def test_calls_are_counted_by_status(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            await harness.operations.GetStatus(pb.GetStatusRequest())
            await error_of(harness.inference.Complete(inference_pb2.GenerateRequest()))
            raw = harness.channel.unary_unary("/slipstream.v1.Inference/Complete")
            await error_of(raw(b"\xff"))
            cancelled = harness.inference.Generate(inference_pb2.GenerateRequest(text="hello"))
            await harness.pool.submitted(1)
            cancelled.cancel()
            late = harness.inference.Complete(inference_pb2.GenerateRequest(text="hello"), timeout=0.1)
            assert await late.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            expected = {
                ("slipstream.v1.Inference/Generate", "CANCELLED"): 1,
                ("slipstream.v1.Inference/Complete", "DEADLINE_EXCEEDED"): 1,
                ("slipstream.v1.Control/GetStatus", "OK"): 1,
                ("slipstream.v1.Inference/Complete", "INVALID_ARGUMENT"): 2,
            }
            while counts_of(harness) != expected:  # a client may have its error before the call is over
                await asyncio.sleep(0.001)

    run(scenario())


def test_a_worker_that_has_sent_no_status_yet_has_all_its_pages_free(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            harness.pool.views = [WorkerView(view(0, READY).report, None)]
            (worker,) = (await harness.operations.GetStatus(pb.GetStatusRequest())).workers
            assert worker.pages_free == worker.pages == CAPACITY.pages > 0

    run(scenario())
