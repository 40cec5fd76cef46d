"""A front's connections to all workers, kept up by the supervisor's reports.

Knows which workers live and how to reach them; knows no request.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from typing import Any, Protocol, TypeVar

import structlog

from worker.connection import WorkerConnection
from worker.generation import Rejection
from worker.messages import ProfileDone, RejectReason, Status, WorkerToFront
from worker.options import PoolOptions
from worker.queues import connect
from worker.reports import WorkerReport, WorkerState

log = structlog.get_logger(__name__)

T = TypeVar("T")

ABORT_TIMEOUT_S = 30.0
"""For a worker's answer to an abort; it works at once, but a step may have to end first."""
PROFILE_GRACE_S = 10.0
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as this front knows it."""

    report: WorkerReport
    status: Status | None
    """The latest; None before the first, or while it does not run."""


class RosterOwner(Protocol):
    """The pool, as the roster needs it."""

    def on_message(self, connection: WorkerConnection, message: WorkerToFront) -> None:
        """A message that is no reply."""

    def on_ready(self, connection: WorkerConnection) -> None:
        """A worker takes requests."""

    def on_lost(self, connection: WorkerConnection) -> None:
        """A connection is over, after its last message."""

    def on_report(self, report: WorkerReport) -> None:
        """News of a worker; if it died, on_lost was called before."""


class Roster:
    """Used from one asyncio event loop."""

    def __init__(self, front: int, authkey: bytes, options: PoolOptions, owner: RosterOwner) -> None:
        self._authkey = authkey
        self._options = options
        self._owner = owner
        self._log = log.bind(front=front)
        self._reports: dict[int, WorkerReport] = {}
        self._connections: dict[int, WorkerConnection] = {}
        """By worker; one that has not said hello yet takes no requests."""
        self._connecting: dict[int, asyncio.Task[None]] = {}
        self._connected = asyncio.Event()
        self._is_closed = False

    def update(self, reports: Sequence[WorkerReport]) -> None:
        """Takes in the supervisor's latest reports: connects to new workers, forgets dead ones."""
        for report in reports:
            self._reports[report.index] = report
            connection = self._connections.get(report.index)
            if connection is not None and report.has_ended(connection.generation):
                connection.read_to_end()
            self._owner.on_report(report)
            self._start_connecting(report)

    def report(self, worker: int) -> WorkerReport:
        return self._reports[worker]

    def states(self) -> set[WorkerState]:
        return {report.state for report in self._reports.values()}

    def ready(self) -> list[WorkerConnection]:
        """Connections to workers that have said hello."""
        return [connection for connection in self._connections.values() if connection.hello is not None]

    def connection(self, worker: int) -> WorkerConnection:
        """One of ready(). Raises Rejection (NO_WORKER) if this worker is not."""
        connection = self._connections.get(worker)
        if connection is None or connection.hello is None:
            raise Rejection(RejectReason.NO_WORKER, f"worker {worker} is not ready", RETRY_AFTER_S)
        return connection

    async def wait_connected(self) -> None:
        """Until some worker is ready."""
        await self._connected.wait()

    async def statuses(self, timeout_s: float) -> list[WorkerView]:
        """All workers, asked now; one that does not answer in time shows its last status."""
        asked = [connection.ask_status() for connection in self.ready()]
        await asyncio.gather(*(_within(timeout_s, status, None) for status in asked))
        ready = {connection.worker: connection for connection in self.ready()}
        return [
            WorkerView(report, ready[index].status if index in ready else None)
            for index, report in sorted(self._reports.items())
        ]

    async def profile(self, worker: int, steps: int, timeout_s: float) -> ProfileDone:
        """See WorkerPool."""
        asked = self.connection(worker).ask_profile(steps, timeout_s)
        done = await _within(timeout_s + PROFILE_GRACE_S, asked, None)
        if done is None:
            message = f"worker {worker} was lost or does not answer"
            raise Rejection(RejectReason.NO_WORKER, message, RETRY_AFTER_S)
        return done

    async def abort(self, request_id: str) -> bool:
        """Tells every worker; whether one knew the request."""
        asked = [connection.ask_abort(request_id) for connection in self.ready()]
        return any(await asyncio.gather(*(_within(ABORT_TIMEOUT_S, reply, False) for reply in asked)))

    async def close(self) -> None:
        """Closes all connections, without on_lost()."""
        self._is_closed = True
        tasks = list(self._connecting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    # ---- for connections

    def on_message(self, connection: WorkerConnection, message: WorkerToFront) -> None:
        self._owner.on_message(connection, message)

    def on_ready(self, connection: WorkerConnection) -> None:
        self._log.info("worker_connected", worker=connection.worker, generation=connection.generation)
        self._connected.set()
        self._owner.on_ready(connection)

    def on_lost(self, connection: WorkerConnection) -> None:
        worker, generation = connection.worker, connection.generation
        in_flight = len(connection.in_flight)
        self._log.warning("worker_lost", worker=worker, generation=generation, sequences=in_flight)
        if self._connections.get(worker) is connection:
            del self._connections[worker]
        if not self.ready():
            self._connected.clear()
        self._owner.on_lost(connection)
        self._start_connecting(self._reports[worker])

    # ---- connecting

    def _start_connecting(self, report: WorkerReport) -> None:
        worker = report.index
        if self._is_closed or report.address is None:
            return
        if worker not in self._connections and worker not in self._connecting:
            self._connecting[worker] = asyncio.get_running_loop().create_task(self._connect(worker))

    async def _connect(self, worker: int) -> None:
        """Until there is a connection, or nothing to connect to."""
        try:
            while (report := self._reports[worker]).address is not None:
                channel = await self._try_to_connect(report.address)
                if channel is not None:
                    self._connections[worker] = WorkerConnection(channel, worker, report.generation, self)
                    return
                await asyncio.sleep(self._options.reconnect_delay_s)
        finally:
            del self._connecting[worker]

    async def _try_to_connect(self, address: str) -> socket.socket | None:
        try:
            return await asyncio.to_thread(connect, address, self._authkey, self._options.connect_timeout_s)
        except (OSError, EOFError):
            return None  # it just died, most likely; a report will say so
        except AuthenticationError:
            self._log.error("worker_refuses_key", address=address)
            return None


async def _within(timeout_s: float, reply: Coroutine[Any, Any, T], otherwise: T) -> T:
    try:
        return await asyncio.wait_for(reply, timeout_s)
    except TimeoutError:
        return otherwise
