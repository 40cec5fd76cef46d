"""How workers are to be set up, and how fronts deal with them. Read once at start, passed down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.options import EngineOptions
from worker.scheduling.options import SchedulerOptions


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What the supervisor needs to know to run workers. Picklable: it travels to each worker."""

    engine: EngineOptions
    """Worker i runs on device engine.device + i."""
    workers: int = 1
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    """Its max_queued bounds each worker's queue."""
    hang_timeout_s: float = 300.0
    """A worker whose step takes longer ends itself, to be started anew. Generous: a step may compile."""
    configure_logs: Callable[..., None] | None = None
    """Called in each worker as configure_logs(process="worker", worker=index). Must pickle."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """What the supervisor does about deaths."""

    first_delay_s: float = 0.0
    """Before the first restart of a worker that had served."""
    delay_s: float = 0.2
    """Before the second restart in a row without having served; doubles with each further one."""
    max_delay_s: float = 10.0
    max_deaths: int = 5
    """So many deaths in a row, without having served in between …"""
    window_s: float = 60.0
    """… and within so long: the worker is given up."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How a front deals with its workers."""

    pause_at: int = 1024
    """Tokens of one answer that nobody has read, at which the worker is told to halt it."""
    orphan_wait_s: float = 120.0
    """How long a request that lost its worker waits for another before it fails."""
    max_deaths: int = 10
    """A request that has seen so many worker deaths fails, however innocent it looks."""
    imbalance: float = 4.0
    """How much more load, in sequences, a worker may have than the least loaded one and still be preferred
    because it holds the prompt's beginning; a quarter of that one's load, if this is more."""
    remembered_prefixes: int = 8192
    """Prompt beginnings remembered per worker."""
    connect_timeout_s: float = 10.0
    reconnect_delay_s: float = 0.05


DEFAULT_RESTARTS = RestartPolicy()
DEFAULT_POOL = PoolOptions()
