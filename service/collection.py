"""Gathers the metrics of every process into one snapshot: fronts are asked, and say what workers told them.

Lives in the main process. Knows no RPC; how a message reaches a front is the caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from service.control_channel import CollectMetrics, FrontMetrics
from service.metrics import ProcessMetrics
from worker.client import METRICS_PREFIX, PAGE_SIZE, MetricData, Status, WorkerReport, WorkerState

TIMEOUT_S = 1.0
"""A front that is too busy to answer by then is shown as it last was."""


@dataclass(slots=True)
class _Pending:
    """One round of questions."""

    waiting: set[int]
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class MetricsCollector:
    """Used from one event loop."""

    ask_all: Callable[[CollectMetrics], list[int]]
    """Sends to every front; returns their indices."""
    front_processes: Callable[[], list[tuple[int, int]]]
    """(index, generation) of the fronts alive."""
    worker_reports: Callable[[], Sequence[WorkerReport]]
    front_restarts: Callable[[], int]
    _series: ProcessMetrics = field(default_factory=ProcessMetrics)
    _statuses: dict[tuple[int, int], Status] = field(default_factory=dict)
    _pending: dict[int, _Pending] = field(default_factory=dict)
    _round: int = 0
    _under_way: asyncio.Task[list[MetricData]] | None = None

    async def collect(self) -> list[MetricData]:
        """All series, merged. Callers at the same time share one round."""
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.create_task(self._collect())
        return await asyncio.shield(self._under_way)

    def take(self, index: int, answer: FrontMetrics) -> None:
        """The answer of front `index`."""
        generation = dict(self.front_processes())[index]
        self._series.update(("front", index, generation), answer.metrics)
        for worker, status in answer.workers.items():
            known = self._statuses.get(worker)
            if known is None or status.steps >= known.steps:
                self._statuses[worker] = status
                self._series.update(("worker", *worker), status.metrics)
        self._settle(answer.ticket, index)

    def forget(self, index: int) -> None:
        """A front is gone and will not answer."""
        for ticket in list(self._pending):
            self._settle(ticket, index)

    def _settle(self, ticket: int, index: int) -> None:
        if pending := self._pending.get(ticket):
            pending.waiting.discard(index)
            if not pending.waiting:
                pending.done.set()

    async def _collect(self) -> list[MetricData]:
        self._round += 1
        ticket = self._round
        pending = self._pending[ticket] = _Pending(set())
        pending.waiting.update(self.ask_all(CollectMetrics(ticket)))
        try:
            if pending.waiting:
                await asyncio.wait_for(pending.done.wait(), TIMEOUT_S)
        except TimeoutError:
            pass
        finally:
            del self._pending[ticket]
        return self._merged()

    def _merged(self) -> list[MetricData]:
        reports = self.worker_reports()
        workers = {
            (report.index, report.generation)
            for report in reports
            if report.state in (WorkerState.READY, WorkerState.DRAINING)
        }
        fronts = [("front", *process) for process in self.front_processes()]
        self._series.keep_only([*fronts, *(("worker", *worker) for worker in workers)])
        self._statuses = {key: status for key, status in self._statuses.items() if key in workers}
        server = server_series(reports, self.front_restarts(), list(self._statuses.values()))
        return [*server, *self._series.merged()]


def server_series(
    reports: Sequence[WorkerReport], front_restarts: int, statuses: Sequence[Status]
) -> list[MetricData]:
    """What concerns the server as a whole."""
    ready = sum(report.state is WorkerState.READY for report in reports)
    restarts = sum(report.restarts for report in reports)
    pages = max((status.pages for status in statuses), default=0)
    cache_labels = (("block_size", str(PAGE_SIZE)), ("num_gpu_blocks", str(pages)))
    return [
        _data("workers", "gauge", "Worker processes, as configured.", len(reports)),
        _data("workers_ready", "gauge", "Worker processes that take requests.", ready),
        MetricData(
            METRICS_PREFIX + "worker_restarts", "counter", "Workers started anew after a death.", (), restarts
        ),
        MetricData(
            METRICS_PREFIX + "front_restarts",
            "counter",
            "Fronts started anew after a death.",
            (),
            front_restarts,
        ),
        MetricData(
            METRICS_PREFIX + "cache_config_info",
            "gauge",
            "Always 1; the labels say how each worker's KV cache is laid out.",
            cache_labels,
            1.0,
        ),
    ]


def _data(name: str, kind: str, help_text: str, value: float) -> MetricData:
    return MetricData(METRICS_PREFIX + name, kind, help_text, (), float(value))
