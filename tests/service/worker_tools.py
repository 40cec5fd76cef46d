"""Real worker processes around a simulated engine, for tests: with misfortunes, and driven by hand."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import worker.links
from engine.errors import ModelError
from engine.interface import Engine, Progress, Sampling, StepHandle, StepPlan
from engine.options import EngineOptions
from engine.simulated import SimulatedEngine, SimulatedOptions
from engine.simulated.tokens import advance, advance_all, choose
from worker.client import (
    AnswerFinished,
    FinishReason,
    Generation,
    GenerationRequest,
    PoolOptions,
    RestartPolicy,
    SchedulerOptions,
    Status,
    WorkerOptions,
    WorkerPool,
    WorkerReport,
    WorkerState,
    WorkerSupervisor,
)

TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Misfortune:
    """What the engine does to its own process, as soon as it prefills `token`."""

    token: int
    signal: int | None = None
    """Kill itself by this signal; None: raise an error, as a broken device would."""
    hangs: bool = False
    """Never return, instead."""


@dataclass(frozen=True)
class EngineSetup:
    """Runs in each worker, in place of configuring logs: puts a simulated engine where the real one would be
    loaded."""

    simulated: SimulatedOptions = field(default_factory=SimulatedOptions)
    misfortune: Misfortune | None = None
    load_error: str = ""
    """Load fails with this message."""
    hold_load: Path | None = None
    """Loading reads this FIFO to its end first."""
    max_backlog: int | None = None
    """Entries that may wait for a front."""

    def __call__(self, **_role: Any) -> None:
        factory = ModuleType("engine.factory")
        factory.load_engine = self.load  # type: ignore[attr-defined]
        sys.modules["engine.factory"] = factory
        if self.max_backlog is not None:
            worker.links.MAX_BACKLOG = self.max_backlog

    def load(self, options: EngineOptions, progress: Progress) -> Engine:
        progress("reading weights", 0.5)
        if self.hold_load is not None:
            self.hold_load.read_bytes()
        if self.load_error:
            raise ModelError(self.load_error)
        engine = SimulatedEngine(self.simulated)
        return UnluckyEngine(engine, self.misfortune) if self.misfortune else engine


class UnluckyEngine(Engine):
    """Dies of one token."""

    def __init__(self, engine: SimulatedEngine, misfortune: Misfortune) -> None:
        self._engine = engine
        self._misfortune = misfortune
        self.info, self.capacity = engine.info, engine.capacity

    def execute(self, plan: StepPlan) -> StepHandle:
        for chunk in plan.prefills:
            if self._misfortune.token in chunk.tokens:
                if self._misfortune.hangs:
                    threading.Event().wait()
                if self._misfortune.signal is not None:
                    os.kill(os.getpid(), self._misfortune.signal)
                raise RuntimeError(f"token {self._misfortune.token} breaks the engine")
        return self._engine.execute(plan)

    def close(self) -> None:
        self._engine.close()


class Host:
    """A supervisor and pools, joined as the service joins them, within one process."""

    def __init__(
        self,
        setup: EngineSetup | None = None,
        *,
        workers: int = 1,
        scheduler: SchedulerOptions | None = None,
        restarts: RestartPolicy | None = None,
        hang_timeout_s: float = 300.0,
    ) -> None:
        options = WorkerOptions(
            engine=EngineOptions(Path("unused"), engine="simulated"),
            workers=workers,
            scheduler=scheduler or SchedulerOptions(),
            hang_timeout_s=hang_timeout_s,
            configure_logs=setup or EngineSetup(),
        )
        self.pools: list[WorkerPool] = []
        self.history: list[list[WorkerReport]] = []
        self._changed = asyncio.Condition()
        self.supervisor = WorkerSupervisor(options, self._on_change, restarts or RestartPolicy(delay_s=0.01))

    def _on_change(self, reports: list[WorkerReport]) -> None:
        self.history.append(reports)
        for pool in self.pools:
            pool.update(reports)
        asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def add_pool(self, options: PoolOptions | None = None) -> WorkerPool:
        pool = WorkerPool(len(self.pools), self.supervisor.authkey, options or PoolOptions())
        self.pools.append(pool)
        pool.update(self.supervisor.reports())
        return pool

    async def until(self, condition: Callable[[list[WorkerReport]], bool]) -> list[WorkerReport]:
        """Waits for the supervisor's reports to be so."""
        async with asyncio.timeout(TIMEOUT_S), self._changed:
            await self._changed.wait_for(lambda: condition(self.supervisor.reports()))
        return self.supervisor.reports()

    async def until_ready(self, *, restarts: int = 0) -> list[WorkerReport]:
        return await self.until(
            lambda reports: all(
                report.state is WorkerState.READY and report.restarts >= restarts for report in reports
            )
        )

    def kill(self, worker: int = 0, number: int = signal.SIGKILL) -> None:
        pid = self.supervisor.reports()[worker].pid
        assert pid is not None
        os.kill(pid, number)


@asynccontextmanager
async def running(
    host: Host, pools: int = 1, *, pool_options: PoolOptions | None = None
) -> AsyncIterator[Host]:
    """Everything up and connected; everything down afterwards."""
    async with asyncio.timeout(TIMEOUT_S * 2):
        host.supervisor.start()
        try:
            await host.until_ready()
            for _ in range(pools):
                await until_connected(host.add_pool(pool_options))
            yield host
        finally:
            for pool in host.pools:
                await pool.close()
            await host.supervisor.stop()


@dataclass
class Answered:
    """All that came of one answer."""

    tokens: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    finished: AnswerFinished | None = None

    @property
    def reason(self) -> FinishReason | None:
        return self.finished.reason if self.finished else None


async def until_connected(pool: WorkerPool) -> None:
    """Waits for the pool to be connected to every worker."""
    async with asyncio.timeout(TIMEOUT_S):
        await pool.wait_connected()
        while not all(view.status is not None for view in await pool.statuses()):
            await asyncio.sleep(0)


async def until_status(pool: WorkerPool, condition: Callable[[Status], bool], worker: int = 0) -> Status:
    """Asks a worker until its status is so."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            status = (await pool.statuses())[worker].status
            if status is not None and condition(status):
                return status


async def read(
    generation: Generation, on_progress: Callable[[list[Answered]], None] | None = None
) -> list[Answered]:
    """Reads to the end, checking what every update must keep."""
    answers = [Answered() for _ in generation.answers]
    while (update := await generation.next()) is not None:
        for part in update.answers:
            answer = answers[part.index]
            assert answer.finished is None, "an update after the last one"
            answer.tokens += part.tokens
            if part.started is not None:
                assert answer.cached_tokens is None, "started twice"
                answer.cached_tokens = part.started.cached_tokens
            answer.finished = part.finished
        if on_progress is not None:
            on_progress(answers)
    return answers


def expected(setup: EngineSetup, prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """What the simulated model answers, computed without a worker."""
    sampling, token_ids = Sampling(seed=seed), range(setup.simulated.vocab_size)
    state, tokens = advance_all(0, np.array(prompt, np.int32)), list[int]()
    for index in range(count):
        tokens.append(choose(state, sampling, index, token_ids, 0))
        state = advance(state, tokens[-1])
    return tokens


def request(
    name: str, prompt: Sequence[int], max_tokens: int, seed: int = 0, **more: Any
) -> GenerationRequest:
    return GenerationRequest(name, list(prompt), Sampling(seed=seed), max_tokens, **more)
