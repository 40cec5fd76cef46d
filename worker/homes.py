"""Where each of a front's sequences is in flight. Sends nothing."""

from __future__ import annotations

from worker.answers import Answer
from worker.connection import WorkerConnection
from worker.generation import Generation


class Homes:
    """By key; the connections know the same of their own sequences, and both are changed here."""

    def __init__(self) -> None:
        self._homes: dict[int, WorkerConnection] = {}

    def of(self, key: int) -> WorkerConnection | None:
        """None for a sequence that is over, or an orphan."""
        return self._homes.get(key)

    def settle(self, connection: WorkerConnection, generation: Generation, answer: Answer) -> None:
        """The connection is about to be sent this sequence."""
        connection.add(generation, answer)
        self._homes[answer.key] = connection

    def leave(self, key: int) -> WorkerConnection | None:
        """The sequence is over or not wanted: the connection that had it."""
        connection = self._homes.pop(key, None)
        if connection is not None:
            connection.remove(key)
        return connection

    def lose(self, connection: WorkerConnection) -> list[tuple[Generation, Answer]]:
        """The connection is over: what was in flight on it."""
        lost = list(connection.in_flight.values())
        for _, answer in lost:
            self.leave(answer.key)
        return lost
