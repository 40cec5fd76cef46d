"""What the main process and its fronts say to each other, and the pipe that carries it.

A pipe's end doubles as the sign that the other side is gone, by whatever death. Knows no RPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from worker.client import MetricData, Status, WorkerReport

# ---- main → front


@dataclass(frozen=True, slots=True)
class WorkersChanged:
    """All workers, as the supervisor sees them now."""

    reports: tuple[WorkerReport, ...]


@dataclass(frozen=True, slots=True)
class BeginDrain:
    """Refuse new requests, finish running ones; answered by OpenStreams, now and at every change."""


@dataclass(frozen=True, slots=True)
class Finish:
    """End now: what still runs is cut off."""


@dataclass(frozen=True, slots=True)
class CollectMetrics:
    """Answered by FrontMetrics."""

    ticket: int


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """All processes' metrics, merged: the answer to MetricsWanted."""

    ticket: int
    metrics: list[MetricData]


# ---- front → main


@dataclass(frozen=True, slots=True)
class Listening:
    """The front takes connections."""

    port: int


@dataclass(frozen=True, slots=True)
class ModelKnown:
    """The front is connected to a worker and takes requests."""


@dataclass(frozen=True, slots=True)
class FrontFailed:
    """The front cannot serve and ends itself; starting it again would not help."""

    message: str


@dataclass(frozen=True, slots=True)
class OpenStreams:
    """While draining: requests that still run here."""

    count: int


@dataclass(frozen=True, slots=True)
class DrainWanted:
    """Control.Drain was called."""

    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class MetricsWanted:
    """Control.GetMetrics was called; answered by ServerMetrics."""

    ticket: int


@dataclass(frozen=True, slots=True)
class FrontMetrics:
    ticket: int
    metrics: list[MetricData]
    """This front's own."""
    workers: dict[tuple[int, int], Status] = field(default_factory=dict)
    """By (worker, generation), as this front last heard."""


class ControlChannel:
    """One end of a pipe, on the event loop: messages come in through a callback.

    Messages are small (a full metrics snapshot pickles to some 20 kB) and few, so that sending blocks.
    """

    def __init__(
        self, pipe: Connection, on_message: Callable[[Any], None], on_end: Callable[[], None]
    ) -> None:
        """Starts reading. `on_end` is called once, when the other side is gone, unless close() came first."""
        self._pipe = pipe
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self._loop.add_reader(pipe.fileno(), self._read)

    def send(self, message: Any) -> None:
        """Does nothing if the other side is gone: on_end tells."""
        if not self._is_open:
            return
        try:
            self._pipe.send(message)
        except OSError:
            self._end()

    def drain(self) -> None:
        """Takes in what has already arrived."""
        self._read()

    def close(self) -> None:
        """Idempotent."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._pipe.fileno())
            self._pipe.close()

    def _read(self) -> None:
        try:
            while self._is_open and self._pipe.poll():
                self._on_message(self._pipe.recv())
        except (EOFError, OSError):
            self._end()

    def _end(self) -> None:
        if self._is_open:
            self.close()
            self._on_end()
