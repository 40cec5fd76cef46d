"""A worker's connections: to every front, and to its supervisor. One wait for all of them.

A front that does not read never blocks the worker: what it has not taken gathers, merged, up to a bound.
Knows messages only as things to pass on.
"""

from __future__ import annotations

import itertools
import selectors
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import structlog

from worker.backlog import MAX_BACKLOG, backlog_size, merge_step_tokens
from worker.messages import FrontToWorker, Hello, WorkerToFront
from worker.queues import MessageQueue, QueueClosed, QueueListener
from worker.reports import Stop, SupervisorToWorker

log = structlog.get_logger(__name__)

FrontQueue = MessageQueue[WorkerToFront, FrontToWorker]

SUPERVISOR = -1
"""Stands where a front's number would, for messages from the supervisor."""


@dataclass(frozen=True, slots=True)
class FrontGone:
    """A front's connection has ended; nothing follows from it."""


Incoming = tuple[int, FrontToWorker | FrontGone | SupervisorToWorker]


class Links:
    """Receives from and sends to numbered fronts. A front that reconnects gets a new number."""

    def __init__(self, control: Connection, hello: Hello) -> None:
        """`control` leads to the supervisor; `hello` is the first message to every front."""
        self._hello = hello
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._queues: dict[int, FrontQueue] = {}
        self._numbers = itertools.count()
        self._incoming: list[Incoming] = []
        self._arrivals: deque[socket.socket] = deque()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._listener: QueueListener | None = None
        self._register(self._wake_receiver, self._take_arrivals)
        self._register(control, self._read_control)

    def listen(self, address: str, authkey: bytes) -> None:
        self._listener = QueueListener(address, authkey, self._arrive)

    def poll(self, timeout_s: float | None) -> list[Incoming]:
        """What has come, waiting up to `timeout_s` (None: for ever) for something to come."""
        for key, events in self._selector.select(0 if self._incoming else timeout_s):
            key.data(events)
        incoming, self._incoming = self._incoming, []
        return incoming

    def send(self, front: int, message: WorkerToFront) -> None:
        """Sends what can be sent at once, keeps the rest. A front that has gone is no error."""
        queue = self._queues.get(front)
        if queue is None:
            return
        queue.put(message)
        if not queue.flush():
            self._await_room(front, queue)

    def broadcast(self, message: WorkerToFront) -> None:
        """Sends news that soon goes stale: fronts with a backlog are left out."""
        for front, queue in list(self._queues.items()):
            if not queue.has_unsent:
                self.send(front, message)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for queue in self._queues.values():
            queue.close()
        self._selector.close()

    def _register(self, source: socket.socket | Connection, on_event: Callable[[int], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, on_event)

    def _arrive(self, connection: socket.socket) -> None:
        """Called from the listener's threads: leaves the connection for poll()."""
        self._arrivals.append(connection)
        with suppress(BlockingIOError):  # full: poll() is about to wake up anyway
            self._wake_sender.send(b"\0")

    def _take_arrivals(self, _events: int) -> None:
        self._wake_receiver.recv(4096)
        while self._arrivals:
            self._add_front(self._arrivals.popleft())

    def _add_front(self, connection: socket.socket) -> None:
        front = next(self._numbers)
        queue = FrontQueue(connection, merge_step_tokens)
        self._queues[front] = queue
        self._selector.register(
            queue, selectors.EVENT_READ, lambda events: self._serve_front(front, queue, events)
        )
        log.info("front_connected", front=front)
        self.send(front, self._hello)

    def _serve_front(self, front: int, queue: FrontQueue, events: int) -> None:
        if front not in self._queues:
            return
        if events & selectors.EVENT_WRITE and queue.flush():
            self._selector.modify(queue, selectors.EVENT_READ, self._selector.get_key(queue).data)
        if events & selectors.EVENT_READ:
            try:
                self._incoming += [(front, message) for message in queue.receive_all()]
            except QueueClosed:
                self._drop(front, queue, "closed")

    def _await_room(self, front: int, queue: FrontQueue) -> None:
        if backlog_size(queue.waiting) > MAX_BACKLOG:
            self._drop(front, queue, "does not read")
            return
        both = selectors.EVENT_READ | selectors.EVENT_WRITE
        key = self._selector.get_key(queue)
        if key.events != both:
            self._selector.modify(queue, both, key.data)

    def _drop(self, front: int, queue: FrontQueue, reason: str) -> None:
        log.info("front_gone", front=front, reason=reason)
        self._selector.unregister(queue)
        queue.close()
        del self._queues[front]
        self._incoming.append((front, FrontGone()))

    def _read_control(self, _events: int) -> None:
        try:
            message: SupervisorToWorker = self._control.recv()
        except (EOFError, OSError):
            self._selector.unregister(self._control)
            message = Stop()
        self._incoming.append((SUPERVISOR, message))
