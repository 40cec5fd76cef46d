"""What the main process and its fronts say to each other, and the socket pair that carries it.

Its end doubles as the sign that the other side is gone, by whatever death. Knows no RPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from worker.client import MetricData, Status, WorkerReport

_LENGTH = struct.Struct("<I")

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
    """Control.GetMetrics was called; answered by ServerMetrics. Not sent again before the answer."""


@dataclass(frozen=True, slots=True)
class FrontMetrics:
    """The answer to CollectMetrics."""

    ticket: int
    metrics: list[MetricData]
    """This front's own."""
    workers: dict[tuple[int, int], Status] = field(default_factory=dict)
    """By (worker, generation), as this front last heard."""


class ControlChannel:
    """One end of a socket pair, on the event loop. Neither end ever waits for the other to read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """See open()."""
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> ControlChannel:
        """Takes over one end of a socket pair."""
        return cls(*await asyncio.open_connection(sock=end))

    def send(self, message: Any) -> None:
        """Does nothing if the other side is gone: the end of messages() tells."""
        if not self._writer.is_closing():
            data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
            self._writer.write(_LENGTH.pack(len(data)) + data)

    async def messages(self) -> AsyncIterator[Any]:
        """What the other side sends, until it is gone, by whatever death."""
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                yield pickle.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    async def close(self) -> None:
        """Sends what is still to be sent. Idempotent."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
