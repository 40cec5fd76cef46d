"""What a worker tells its supervisor, and what the supervisor tells everybody about a worker. Plain data."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import IntEnum

from engine.interface import EngineCapacity, EngineInfo


class WorkerState(IntEnum):
    """The same numbers as slipstream.v1.WorkerState."""

    LOADING = 1
    READY = 2
    DRAINING = 3
    RESTARTING = 4
    """Died; being started again."""
    FAILED = 5
    """Given up: it could not load, or died too often."""


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """How one generation of a worker ended, unasked."""

    generation: int
    exit_code: int
    """As multiprocessing has it: −n for signal n."""

    @property
    def was_killed(self) -> bool:
        """By a signal that only comes from outside: SIGKILL (an operator, the kernel short of memory) or
        SIGTERM. A crash or an engine error is the worker's own doing, or a request's."""
        return self.exit_code in (-signal.SIGKILL, -signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker as the supervisor sees it."""

    index: int
    state: WorkerState
    generation: int = 0
    """Counts the starts of this worker, from 0."""
    pid: int | None = None
    address: str | None = None
    """Of the worker's socket; set while it takes connections."""
    load_stage: str = ""
    load_progress: float = 0.0
    """0 to 1."""
    restarts: int = 0
    last_error: str = ""
    deaths: tuple[WorkerDeath, ...] = ()
    """The latest few, oldest first."""
    info: EngineInfo | None = None
    """Of this or the last generation that loaded."""
    capacity: EngineCapacity | None = None

    def has_ended(self, generation: int) -> bool:
        """Whether that generation of this worker is over."""
        return self.generation > generation or self.state is WorkerState.FAILED


# ---- worker → supervisor, over the pipe between them


@dataclass(frozen=True, slots=True)
class Loading:
    """How far the engine has loaded."""

    stage: str
    progress: float
    """0 to 1."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is loaded and the socket accepts connections."""

    address: str
    info: EngineInfo
    capacity: EngineCapacity


@dataclass(frozen=True, slots=True)
class Served:
    """A sequence has finished on this generation, or many steps have gone well: its death, should it come, is
    not one at start."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker is about to end itself."""

    message: str
    is_user_error: bool
    """Starting it again would fail in the same way (bad model, impossible options)."""


# ---- supervisor → worker


@dataclass(frozen=True, slots=True)
class Drain:
    """Admit no new request."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End now."""


WorkerToSupervisor = Loading | Ready | Served | Failed
SupervisorToWorker = Drain | Stop
