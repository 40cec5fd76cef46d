"""All processes of a running server: workers and fronts, from their start to a drain's end.

Passes what the one says on to the other, and counts what a drain still waits for. Knows no gRPC, no engine
and no signal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import structlog

from service.collection import MetricsCollector
from service.console import Console
from service.control_channel import (
    BeginDrain,
    DrainWanted,
    FrontMetrics,
    MetricsWanted,
    OpenStreams,
    ServerMetrics,
    WorkersChanged,
)
from service.front import FrontSettings
from service.fronts import FrontEvents, FrontGroup, FrontStage
from service.shutdown import ServerFailed, Shutdown
from worker.client import EngineInfo, WorkerOptions, WorkerReport, WorkerState, WorkerSupervisor

log = structlog.get_logger(__name__)

STOP_GRACE_S = 5.0


class Cluster:
    """Used from one event loop; close() is to be called whatever happens."""

    def __init__(
        self,
        workers: WorkerOptions,
        fronts: int,
        settings: FrontSettings,
        shutdown: Shutdown,
        console: Console,
    ) -> None:
        """`settings`: of front 0; its authkey is filled in."""
        self._shutdown = shutdown
        self._console = console
        self._open_streams: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._supervisor = WorkerSupervisor(workers, self._on_workers)
        events = FrontEvents(self._on_message, self._on_front_start, self._on_front_gone, shutdown.fail)
        self._fronts = FrontGroup(settings.with_authkey(self._supervisor.authkey), fronts, events)
        self.metrics = MetricsCollector(
            ask_all=self._fronts.send_all,
            front_processes=lambda: self._fronts.processes,
            worker_reports=self._supervisor.reports,
            front_restarts=lambda: self._fronts.restarts,
        )

    @property
    def is_ready(self) -> bool:
        return any(report.state is WorkerState.READY for report in self._supervisor.reports())

    def start(self) -> None:
        """Workers first: theirs is the longest way to readiness."""
        self._supervisor.start()
        self._fronts.start()

    async def wait_listening(self) -> bool:
        """Until every front takes connections; False if the server is to end first. Raises ServerFailed."""
        return await self._before_shutdown(self._fronts.wait_stage(FrontStage.LISTENING))

    async def wait_ready(self) -> EngineInfo | None:
        """Until every front takes requests: what runs them; None if the server is to end first. Raises
        ServerFailed or WorkerFailed."""
        if not await self._before_shutdown(self._supervisor.wait_ready()):
            return None
        if not await self._before_shutdown(self._fronts.wait_stage(FrontStage.SERVING)):
            return None
        return next(report.info for report in self._supervisor.reports() if report.info is not None)

    async def wait_shutdown(self) -> None:
        """Until the server is to end. Raises ServerFailed when no worker can serve any more."""
        await self._before_shutdown(asyncio.Event().wait())

    async def drain(self) -> None:
        """Lets running requests finish, or cuts them off at the deadline. Raises StoppedAtOnce."""
        log.info("draining")
        self._fronts.retire()
        self._fronts.send_all(BeginDrain())
        self._supervisor.drain()
        while (left := self._streams_left()) != 0:
            if left is not None:
                self._console.draining(left)
            time_left_s = self._shutdown.time_left_s
            if time_left_s is not None and time_left_s <= 0:
                log.warning("drain_timed_out", streams=left)
                return
            await self._shutdown.wait_changed(time_left_s)
        self._console.draining(0)

    async def close(self) -> None:
        """Ends all processes: in order, or at once if that is wanted."""
        grace_s = 0.0 if self._shutdown.is_at_once else STOP_GRACE_S
        await self._fronts.stop(grace_s)
        await self._supervisor.stop(grace_s)

    async def _before_shutdown(self, event: Awaitable[Any]) -> bool:
        """Waits for `event`, and raises what it raises; False if the server is to end first."""
        waits = [
            asyncio.ensure_future(wait)
            for wait in (event, self._supervisor.wait_failed(), self._shutdown.wait_wanted())
        ]
        wanted, failed, shutdown = waits
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if shutdown.done():
                shutdown.result()
                return False
            if wanted.done():
                wanted.result()
                return True
            raise ServerFailed(failed.result())
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _streams_left(self) -> int | None:
        """Over all fronts alive; None until each of them has said."""
        counts = [self._open_streams.get(index) for index, _ in self._fronts.processes]
        return None if None in counts else sum(count or 0 for count in counts)

    # ---- what happens

    def _on_workers(self, reports: list[WorkerReport]) -> None:
        self._console.workers(reports)
        self._fronts.send_all(WorkersChanged(tuple(reports)))

    def _on_front_start(self, index: int) -> None:
        self._fronts.send(index, WorkersChanged(tuple(self._supervisor.reports())))

    def _on_front_gone(self, index: int) -> None:
        self._open_streams.pop(index, None)
        self.metrics.forget(index)
        self._shutdown.notify()

    def _on_message(self, index: int, message: Any) -> None:
        match message:
            case OpenStreams(count=count):
                self._open_streams[index] = count
                self._shutdown.notify()
            case DrainWanted(timeout_s=timeout_s):
                self._shutdown.drain(timeout_s)
            case MetricsWanted():
                task = asyncio.create_task(self._send_metrics(index))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case FrontMetrics():
                self.metrics.take(index, message)

    async def _send_metrics(self, index: int) -> None:
        self._fronts.send(index, ServerMetrics(await self.metrics.collect()))
