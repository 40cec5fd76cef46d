"""Starts workers, watches them, starts them anew when they die. Lives in the main process, in asyncio."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog

from worker.options import DEFAULT_RESTARTS, RestartPolicy, WorkerOptions
from worker.process import EXIT_LOAD, WorkerSpec
from worker.reports import Drain, Failed, Loading, Ready, Served, Stop, WorkerDeath, WorkerReport, WorkerState
from worker.supervised import SupervisedProcess

log = structlog.get_logger(__name__)

REMEMBERED_DEATHS = 8
MAX_ADDRESS_BYTES = 100
"""A Unix socket's path may have 107."""


class WorkerFailed(Exception):
    """No worker can serve; str() is one clear message, fit to be shown without a traceback."""


class WorkerSupervisor:
    """Used from one asyncio event loop."""

    authkey: bytes
    """Secret of this server's sockets; fronts need it."""

    def __init__(
        self,
        options: WorkerOptions,
        on_change: Callable[[list[WorkerReport]], None] | None = None,
        restarts: RestartPolicy = DEFAULT_RESTARTS,
    ) -> None:
        """`on_change` is called from the event loop with all reports whenever one has changed."""
        self.authkey = os.urandom(32)
        self._options = options
        self._on_change = on_change
        self._folder: Path | None = None
        self._changed = asyncio.Event()
        self._fatal: str | None = None
        self._is_draining = False
        self._is_stopping = False
        self._workers = [_Worker(self, index, restarts) for index in range(options.workers)]

    def start(self) -> None:
        """Starts all workers; to be called once, inside the running event loop."""
        self._folder = _private_folder()
        for worker in self._workers:
            worker.start()

    def reports(self) -> list[WorkerReport]:
        """By worker index."""
        return [worker.report for worker in self._workers]

    async def wait_ready(self) -> None:
        """Until some worker is ready. Raises WorkerFailed if none can become so."""
        while not any(worker.report.state is WorkerState.READY for worker in self._workers):
            if (failure := self._failure()) is not None:
                raise WorkerFailed(failure)
            await self._next_change()

    async def wait_failed(self) -> str:
        """Until the server can serve no more (every worker is given up, or one could not load at the first
        start, for a reason that a restart does not cure); returns the message."""
        while (failure := self._failure()) is None:
            await self._next_change()
        return failure

    def drain(self) -> None:
        """Workers admit no new requests; what runs goes on, also over a restart."""
        self._is_draining = True
        for worker in self._workers:
            worker.drain()

    async def stop(self, grace_s: float = 5.0) -> None:
        """Ends all workers: asks, waits, then kills. Idempotent."""
        self._is_stopping = True
        await asyncio.gather(*(worker.stop(grace_s) for worker in self._workers))
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    def spec(self, index: int, generation: int) -> WorkerSpec:
        """For a worker that is about to start."""
        assert self._folder is not None
        address = str(self._folder / f"worker-{index}.{generation}")
        return WorkerSpec(index, generation, self._options, address, self.authkey)

    def changed(self) -> None:
        """Some worker's report is a new one."""
        self._changed.set()
        if self._on_change is not None:
            self._on_change(self.reports())

    def cannot_start(self, message: str) -> None:
        """A worker's first start failed for good."""
        self._fatal = self._fatal or message

    @property
    def has_fatal_error(self) -> bool:
        return self._fatal is not None

    def _failure(self) -> str | None:
        if self._fatal is not None:
            return self._fatal
        if all(worker.report.state is WorkerState.FAILED for worker in self._workers):
            last_error = self._workers[0].report.last_error
            return f"no worker lives long enough to serve anybody; the last death: {last_error}"
        return None

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class _Worker:
    """One worker through all its generations."""

    def __init__(self, supervisor: WorkerSupervisor, index: int, policy: RestartPolicy) -> None:
        self.report = WorkerReport(index, WorkerState.LOADING)
        self._supervisor = supervisor
        self._policy = policy
        self._process: SupervisedProcess | None = None
        self._restart: asyncio.TimerHandle | None = None
        self._has_served = False
        self._barren_deaths: list[float] = []
        """When generations died that had served nobody, since one last did."""
        self._failure = ""
        """What this generation has said about its end."""

    def start(self) -> None:
        self._restart = None
        self._has_served = False
        self._failure = ""
        spec = self._supervisor.spec(self.report.index, self.report.generation)
        try:
            self._process = SupervisedProcess(spec, self._on_message, self._on_death)
        except OSError as error:
            self._failure = f"no process could be started: {error}"
            self._on_death(EXIT_LOAD)
            return
        log.info("worker_started", worker=spec.index, generation=spec.generation, pid=self._process.pid)
        self._change(pid=self._process.pid, load_stage="starting", load_progress=0.0)

    def drain(self) -> None:
        if self._process is not None:
            self._process.send(Drain())
        if self.report.state is WorkerState.READY:
            self._change(state=WorkerState.DRAINING)

    async def stop(self, grace_s: float) -> None:
        if self._restart is not None:
            self._restart.cancel()
        if self._process is not None:
            self._process.send(Stop())
            if self.report.address is None:
                self._process.kill()
            await self._process.wait_or_kill(grace_s)

    def _change(self, **changes: object) -> None:
        self.report = replace(self.report, **changes)  # type: ignore[arg-type]
        self._supervisor.changed()

    def _on_message(self, message: object) -> None:
        match message:
            case Loading(stage, progress):
                self._change(load_stage=stage, load_progress=progress)
            case Ready(address, info, capacity):
                state = WorkerState.DRAINING if self._supervisor.is_draining else WorkerState.READY
                log.info("worker_ready", worker=self.report.index, generation=self.report.generation)
                self._change(
                    state=state,
                    address=address,
                    info=info,
                    capacity=capacity,
                    load_stage="",
                    load_progress=1.0,
                )
                if self._supervisor.is_draining:
                    self.drain()
            case Served():
                self._has_served = True
                self._barren_deaths.clear()
            case Failed(text, is_user_error):
                self._failure = text
                if is_user_error and self.report.generation == 0:
                    self._supervisor.cannot_start(text)

    def _on_death(self, exit_code: int) -> None:
        self._process = None
        if self._supervisor.is_stopping:
            self._change(state=WorkerState.DRAINING, pid=None, address=None)
            return
        cause = self._failure or _describe_exit(exit_code)
        death = WorkerDeath(self.report.generation, exit_code)
        deaths = (*self.report.deaths, death)[-REMEMBERED_DEATHS:]
        delay_s = self._delay_before_restart()
        if delay_s is not None or not self._supervisor.has_fatal_error:  # that is told as the server's end
            log.error("worker_died", worker=self.report.index, generation=death.generation, cause=cause)
        if delay_s is None:
            self._change(state=WorkerState.FAILED, pid=None, address=None, last_error=cause, deaths=deaths)
            return
        self._change(
            state=WorkerState.RESTARTING,
            generation=death.generation + 1,
            pid=None,
            address=None,
            restarts=self.report.restarts + 1,
            last_error=cause,
            deaths=deaths,
        )
        self._restart = asyncio.get_running_loop().call_later(delay_s, self.start)

    def _delay_before_restart(self) -> float | None:
        """Seconds; None if this worker is to be given up."""
        if self._has_served:
            return self._policy.first_delay_s
        if self.report.generation == 0 and self._supervisor.has_fatal_error:
            return None
        now = time.monotonic()
        self._barren_deaths.append(now)
        recent = [at for at in self._barren_deaths if now - at <= self._policy.window_s]
        if len(recent) >= self._policy.max_deaths:
            return None
        delay_s = self._policy.delay_s * 2.0 ** (len(self._barren_deaths) - 1)
        return min(delay_s, self._policy.max_delay_s)


def _describe_exit(exit_code: int) -> str:
    if exit_code < 0:
        return f"killed by signal {-exit_code}"
    return f"ended with exit status {exit_code}"


def _private_folder() -> Path:
    """A new folder that only this user can enter, with a path short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="slipstream-"))
    if len(os.fsencode(folder)) + len("/worker-999.999999") > MAX_ADDRESS_BYTES:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="slipstream-", dir="/tmp"))
    return folder
