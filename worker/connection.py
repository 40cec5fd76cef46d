"""A front's connection to one generation of one worker, in asyncio: one wake-up per frame, not per token.

Knows what is in flight on it and how loaded the worker is; knows nothing of other workers.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable
from typing import Protocol

from worker.answers import Answer
from worker.generation import Generation
from worker.messages import (
    Abort,
    AbortDone,
    FrontToWorker,
    Hello,
    Ping,
    ProfileDone,
    ProfileStart,
    Status,
    WorkerToFront,
)
from worker.queues import MessageQueue, QueueClosed

PREFILL_TOKENS_PER_SEQUENCE = 512
"""Prompt tokens still to be computed that count as much load as one running sequence."""


class ConnectionOwner(Protocol):
    """The pool, as a connection needs it."""

    def on_message(self, connection: WorkerConnection, message: WorkerToFront) -> None:
        """A message that is no reply."""

    def on_ready(self, connection: WorkerConnection) -> None:
        """The worker has said hello."""

    def on_lost(self, connection: WorkerConnection) -> None:
        """The connection is over, after its last message."""


class WorkerConnection:
    """Open from its creation until on_lost() or close()."""

    def __init__(self, channel: socket.socket, worker: int, generation: int, owner: ConnectionOwner) -> None:
        self.worker = worker
        self.generation = generation
        self.hello: Hello | None = None
        """None until the worker has said it; nothing may be sent before."""
        self.status: Status | None = None
        self.in_flight: dict[int, tuple[Generation, Answer]] = {}
        """By key, sequences that this worker has."""
        self._not_started: dict[int, int] = {}
        """By key, the prompt's tokens of sequences that have not started."""
        self._others_load = 0
        """Sequences of other fronts, by the latest status."""
        self._owner = owner
        self._replies: dict[int, asyncio.Future[AbortDone | ProfileDone | Status | None]] = {}
        self._tickets = itertools.count()
        self._queue: MessageQueue[FrontToWorker, WorkerToFront] = MessageQueue(channel)
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self._loop.add_reader(self._queue.fileno(), self._on_readable)

    @property
    def load(self) -> float:
        """How busy the worker is, in sequences."""
        prefill = sum(self._not_started.values()) / PREFILL_TOKENS_PER_SEQUENCE
        return len(self.in_flight) + self._others_load + prefill

    def add(self, generation: Generation, answer: Answer) -> None:
        """The worker is about to be sent this sequence."""
        self.in_flight[answer.key] = (generation, answer)
        self._not_started[answer.key] = len(generation.prompt) + len(answer.tokens)

    def started(self, key: int) -> None:
        self._not_started.pop(key, None)

    def remove(self, key: int) -> None:
        """The sequence is over or not wanted."""
        self.in_flight.pop(key, None)
        self._not_started.pop(key, None)

    def send(self, message: FrontToWorker) -> None:
        """Never blocks. On a connection that breaks, the message is lost and on_lost() follows."""
        if not self._is_open:
            return
        self._queue.put(message)
        if not self._queue.flush():
            self._loop.add_writer(self._queue.fileno(), self._on_writable)

    async def ask_abort(self, request_id: str) -> bool:
        reply = await self._ask(lambda ticket: Abort(request_id, ticket))
        return isinstance(reply, AbortDone) and reply.found

    async def ask_status(self) -> Status | None:
        """None if the connection breaks."""
        reply = await self._ask(Ping)
        return reply if isinstance(reply, Status) else None

    async def ask_profile(self, steps: int, timeout_s: float) -> ProfileDone | None:
        """None if the connection breaks."""
        reply = await self._ask(lambda ticket: ProfileStart(ticket, steps, timeout_s))
        return reply if isinstance(reply, ProfileDone) else None

    def read_to_end(self) -> None:
        """The worker is known to be dead: takes what it had still sent, then reports the loss."""
        while self._is_open and self._on_readable():
            pass
        self._lose()

    def close(self) -> None:
        """Without on_lost()."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._queue.fileno())
        self._loop.remove_writer(self._queue.fileno())
        self._queue.close()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_result(None)
        self._replies.clear()

    async def _ask(self, make: Callable[[int], FrontToWorker]) -> AbortDone | ProfileDone | Status | None:
        if not self._is_open:
            return None
        ticket = next(self._tickets)
        reply: asyncio.Future[AbortDone | ProfileDone | Status | None] = self._loop.create_future()
        self._replies[ticket] = reply
        try:
            self.send(make(ticket))
            return await reply
        finally:
            self._replies.pop(ticket, None)

    def _on_readable(self) -> bool:
        """Whether something came."""
        try:
            messages = self._queue.receive_all()
        except QueueClosed:
            self._lose()
            return False
        for message in messages:
            self._take(message)
        return bool(messages)

    def _take(self, message: WorkerToFront) -> None:
        match message:
            case Hello():
                self.hello = message
                self._owner.on_ready(self)
            case Status():
                self.status = message
                known = message.running + message.waiting + message.paused
                self._others_load = max(0, known - len(self.in_flight))
                self._reply(message.ticket, message)
                self._owner.on_message(self, message)
            case AbortDone() | ProfileDone():
                self._reply(message.ticket, message)
            case _:
                self._owner.on_message(self, message)

    def _reply(self, ticket: int | None, message: AbortDone | ProfileDone | Status) -> None:
        reply = None if ticket is None else self._replies.get(ticket)
        if reply is not None and not reply.done():
            reply.set_result(message)

    def _on_writable(self) -> None:
        if self._queue.flush():
            self._loop.remove_writer(self._queue.fileno())

    def _lose(self) -> None:
        if self._is_open:
            self.close()
            self._owner.on_lost(self)
