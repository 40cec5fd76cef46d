"""The main process's side of its fronts: starts them, passes messages, starts a dead one anew.

Knows processes and the control channel; knows no gRPC, no worker and no model.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from multiprocessing.process import BaseProcess
from typing import Any

import structlog

from service.control_channel import ControlChannel, Finish, FrontFailed, Listening, ModelKnown
from service.front import FrontSettings, front_main
from worker.client import spawn_process

log = structlog.get_logger(__name__)

MAX_DEATHS = 5
DEATHS_WINDOW_S = 30.0
"""A front that dies so often within so long has a defect that starting it again does not cure."""
RESTART_DELAY_S = 0.1


class FrontStage(IntEnum):
    """How far a front has come."""

    STARTED = 0
    LISTENING = 1
    """It takes connections, and says that it does not serve yet."""
    SERVING = 2
    """It takes requests."""


@dataclass(slots=True)
class _Front:
    """One front process, of one generation."""

    index: int
    generation: int
    process: BaseProcess
    channel: ControlChannel
    stage: FrontStage = FrontStage.STARTED


@dataclass(slots=True)
class FrontEvents:
    """What the owner wants to hear."""

    on_message: Callable[[int, Any], None]
    """A front's index and its message."""
    on_start: Callable[[int], None]
    """A front has been started, or started anew: it knows nothing yet."""
    on_gone: Callable[[int], None]
    """A front is gone, for good or to be started anew."""
    on_failed: Callable[[str], None]
    """Fronts cannot serve; the message is one clear line."""


@dataclass(slots=True)
class FrontGroup:
    """All fronts. Used from one asyncio event loop."""

    settings: FrontSettings
    """Of front 0, first generation."""
    count: int
    events: FrontEvents
    restarts: int = 0
    _fronts: dict[int, _Front] = field(default_factory=dict)
    _keepers: list[asyncio.Task[None]] = field(default_factory=list)
    _deaths: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_DEATHS))
    _is_stopping: bool = False
    _progressed: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self) -> None:
        self._keepers = [asyncio.create_task(self._keep_running(index)) for index in range(self.count)]

    @property
    def processes(self) -> list[tuple[int, int]]:
        """(index, generation) of those alive."""
        return [(front.index, front.generation) for front in self._fronts.values()]

    async def wait_stage(self, stage: FrontStage) -> None:
        """Until all fronts have come so far."""
        while len(self._fronts) < self.count or any(f.stage < stage for f in self._fronts.values()):
            self._progressed.clear()
            await self._progressed.wait()

    def send(self, index: int, message: Any) -> None:
        """Does nothing if the front is gone."""
        if front := self._fronts.get(index):
            front.channel.send(message)

    def send_all(self, message: Any) -> list[int]:
        """The indices of the fronts it went to."""
        for front in self._fronts.values():
            front.channel.send(message)
        return list(self._fronts)

    def retire(self) -> None:
        """From now on a front that ends is not started anew."""
        self._is_stopping = True

    async def stop(self, grace_s: float) -> None:
        """Ends all fronts: asks, waits, then kills. Idempotent."""
        self.retire()
        self.send_all(Finish())
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=grace_s)
        for front in self._fronts.values():
            front.process.kill()
        await asyncio.gather(*self._keepers)

    async def _keep_running(self, index: int) -> None:
        """One front after the other, until told to retire."""
        generation = 0
        while not self._is_stopping:
            front = await self._start(index, generation)
            async for message in front.channel.messages():
                self._receive(front, message)
            await self._bury(front)
            if not self._is_stopping:
                self._count_death(front)
                await asyncio.sleep(RESTART_DELAY_S)
                generation += 1

    async def _start(self, index: int, generation: int) -> _Front:
        ours, theirs = socket.socketpair()
        settings = replace(self.settings, index=index, generation=generation)
        # A terminal's Ctrl-C and a service manager's SIGTERM go to every process of the group; only the main
        # process acts on them.
        blocked = frozenset({signal.SIGINT, signal.SIGTERM})
        process = spawn_process(front_main, (settings, theirs), f"slipstream-front-{index}", blocked)
        theirs.close()
        front = _Front(index, generation, process, await ControlChannel.open(ours))
        self._fronts[index] = front
        log.debug("front_started", front=index, pid=process.pid, generation=generation)
        self.events.on_start(index)
        return front

    def _receive(self, front: _Front, message: Any) -> None:
        if isinstance(message, Listening):
            front.stage = FrontStage.LISTENING
            self._progressed.set()
        elif isinstance(message, ModelKnown):
            front.stage = FrontStage.SERVING
            self._progressed.set()
        elif isinstance(message, FrontFailed):
            self.retire()
            self.events.on_failed(message.message)
        else:
            self.events.on_message(front.index, message)

    async def _bury(self, front: _Front) -> None:
        """Its end of the channel is closed: it is gone, or about to be."""
        await front.channel.close()
        await asyncio.to_thread(front.process.join)
        del self._fronts[front.index]
        self.events.on_gone(front.index)

    def _count_death(self, front: _Front) -> None:
        """One that nobody asked for."""
        code, now = front.process.exitcode, time.monotonic()
        log.warning("front_died", front=front.index, pid=front.process.pid, exit_code=code)
        self.restarts += 1
        self._deaths.append(now)
        if len(self._deaths) == MAX_DEATHS and now - self._deaths[0] < DEATHS_WINDOW_S:
            self.retire()
            self.events.on_failed(f"front processes keep dying (exit code {code}); the log above says more")
