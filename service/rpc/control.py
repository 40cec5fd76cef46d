"""slipstream.v1.Control: status, metrics, draining, profiling. Answers at any time, loading included.

The server's side of things (several fronts, workers, a main process) stands behind ServerControl.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
from google.protobuf.duration_pb2 import Duration

from protos.slipstream.v1 import control_pb2, control_pb2_grpc
from service.rpc.errors import Context, RpcError, invalid_field, retry_later
from service.rpc.health_states import Condition
from service.rpc.serving import Serving
from service.rpc.violations import Range, Violations
from worker.client import MetricData, Rejection, WorkerState, WorkerView

DEFAULT_PROFILE_STEPS = 32
DEFAULT_PROFILE_TIMEOUT_S = 30.0
STEPS_RANGE = Range(1, 10_000)
PROFILE_TIMEOUT_RANGE = Range(0, 3600, is_low_open=True)
DRAIN_TIMEOUT_RANGE = Range(0, 30 * 24 * 3600)

_METRIC_KINDS = {
    "counter": control_pb2.Metric.KIND_COUNTER,
    "gauge": control_pb2.Metric.KIND_GAUGE,
    "histogram": control_pb2.Metric.KIND_HISTOGRAM,
}


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a front knows of the server as a whole."""

    version: str
    uptime_s: float
    fronts: int
    front: int
    """Which front this is."""
    workers: int
    """As configured."""
    versions: Mapping[str, str]
    """Of the libraries in use."""


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """The whole server's metrics at one moment."""

    metrics: Sequence[MetricData]
    prometheus_text: str


class ServerControl(Protocol):
    """What a front process can ask of the server around it."""

    def facts(self) -> ServerFacts: ...

    async def metrics(self) -> MetricsSnapshot:
        """Of all fronts and workers, added up. Raises TimeoutError."""
        ...

    def drain(self, timeout_s: float | None) -> None:
        """Starts draining the whole server, or changes the timeout. Returns at once."""
        ...


class ControlServicer(control_pb2_grpc.ControlServicer):
    """What operators call."""

    def __init__(self, serving: Serving, server: ServerControl) -> None:
        self._serving = serving
        self._server = server

    async def GetStatus(  # noqa: N802
        self, request: control_pb2.GetStatusRequest, context: Context
    ) -> control_pb2.GetStatusResponse:
        views = await self._serving.pool.statuses()
        facts = self._server.facts()
        versions = dict(facts.versions)
        for view in views:
            if view.report.info is not None:
                versions |= view.report.info.versions
        return control_pb2.GetStatusResponse(
            state=server_state(self._serving.condition),
            version=facts.version,
            uptime_seconds=facts.uptime_s,
            fronts=facts.fronts,
            front=facts.front,
            open_streams=self._serving.requests_open,
            workers=[_worker_status(view) for view in views],
            versions=versions,
        )

    async def GetMetrics(  # noqa: N802
        self, request: control_pb2.GetMetricsRequest, context: Context
    ) -> control_pb2.GetMetricsResponse:
        try:
            snapshot = await self._server.metrics()
        except TimeoutError as error:
            message = "the server's other processes did not say their metrics in time"
            raise RpcError(grpc.StatusCode.UNAVAILABLE, message) from error
        return control_pb2.GetMetricsResponse(
            metrics=[_metric(metric) for metric in snapshot.metrics],
            prometheus_text=snapshot.prometheus_text,
        )

    async def Drain(  # noqa: N802
        self, request: control_pb2.DrainRequest, context: Context
    ) -> control_pb2.DrainResponse:
        timeout_s = None
        if request.HasField("timeout"):
            timeout_s = _seconds("timeout", request.timeout, DRAIN_TIMEOUT_RANGE)
        self._serving.start_draining()
        self._server.drain(timeout_s)
        return control_pb2.DrainResponse(remaining=self._serving.requests_open)

    async def Profile(  # noqa: N802
        self, request: control_pb2.ProfileRequest, context: Context
    ) -> control_pb2.ProfileResponse:
        steps = request.steps if request.HasField("steps") else DEFAULT_PROFILE_STEPS
        timeout_s = DEFAULT_PROFILE_TIMEOUT_S
        violations = Violations()
        STEPS_RANGE.check("steps", steps, violations)
        violations.raise_if_any()
        if request.HasField("timeout"):
            timeout_s = _seconds("timeout", request.timeout, PROFILE_TIMEOUT_RANGE)
        workers = self._server.facts().workers
        if request.worker >= workers:
            raise invalid_field("worker", f"is {request.worker}; this server has {workers}, from 0 on")
        try:
            done = await self._serving.pool.profile(request.worker, steps, timeout_s)
        except Rejection as rejection:
            code = grpc.StatusCode.UNAVAILABLE
            raise retry_later(code, rejection.message, rejection.retry_after_s) from rejection
        return control_pb2.ProfileResponse(
            steps=done.steps,
            stages=[
                control_pb2.StageTiming(
                    stage=stage.stage,
                    mean=stage.mean,
                    median=stage.median,
                    p99=stage.p99,
                    total=stage.total,
                )
                for stage in done.stages
            ],
        )


def server_state(condition: Condition) -> control_pb2.ServerState:
    """The server's state as health has it: a worker counts once requests can be sent to it."""
    if condition.is_draining:
        return control_pb2.SERVER_STATE_DRAINING
    if not any(condition.workers_ready):
        return control_pb2.SERVER_STATE_LOADING
    is_complete = all(condition.workers_ready)
    return control_pb2.SERVER_STATE_SERVING if is_complete else control_pb2.SERVER_STATE_DEGRADED


def _seconds(field: str, duration: Duration, allowed: Range) -> float:
    """Raises RpcError INVALID_ARGUMENT."""
    seconds = duration.seconds + duration.nanos / 1e9
    violations = Violations()
    allowed.check(field, seconds, violations)
    violations.raise_if_any()
    return float(seconds)


def _worker_status(view: WorkerView) -> control_pb2.WorkerStatus:
    report = view.report
    message = control_pb2.WorkerStatus(
        index=report.index,
        pid=report.pid or 0,
        state=report.state,  # type: ignore[arg-type]
        restarts=report.restarts,
        load_stage=report.load_stage,
        load_progress=report.load_progress,
        last_error=report.last_error,
    )
    if report.info is not None:
        message.engine = report.info.engine
        message.device = report.info.device
        message.weight_dtype = report.info.weight_dtype
        message.kv_dtype = report.info.kv_dtype
        message.memory_plan.update(report.info.memory_plan)
        message.fallbacks.extend(report.info.fallbacks)
    if report.capacity is not None:
        message.slots = report.capacity.slots
        message.pages = report.capacity.pages
        if report.state is WorkerState.READY:
            message.pages_free = report.capacity.pages  # until its first status says otherwise
    status = view.status
    if status is not None:
        message.running = status.running
        message.waiting = status.waiting
        message.paused = status.paused
        message.pages_free = status.pages_free
        message.pages_cached = status.pages_cached
        message.steps = status.steps
        message.preemptions = status.preemptions
    return message


def _metric(metric: MetricData) -> control_pb2.Metric:
    message = control_pb2.Metric(
        name=metric.name,
        help=metric.help,
        kind=_METRIC_KINDS[metric.kind],
        labels=dict(metric.labels),
        value=metric.value,
    )
    if metric.histogram is not None:
        message.histogram.bounds.extend(metric.histogram.bounds)
        message.histogram.counts.extend(metric.histogram.counts)
        message.histogram.sum = metric.histogram.sum
    return message
