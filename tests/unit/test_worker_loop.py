"""The worker's loop around an engine that computes inside execute(), on a clock that it alone moves."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from engine.interface import Sampling, StepHandle, StepPlan
from engine.simulated import SimulatedEngine, SimulatedOptions
from worker import loop
from worker.links import Incoming, Links
from worker.messages import Ping, Status, Submit, WorkerToFront
from worker.reports import Stop
from worker.scheduling.options import SchedulerOptions
from worker.watchdog import Watchdog

STEP_S = 0.07
TOKENS = 5


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class ComputingEngine(SimulatedEngine):
    """Every step takes STEP_S, spent before execute() returns."""

    device_clock: Clock

    def execute(self, plan: StepPlan) -> StepHandle:
        self.device_clock.now += STEP_S
        return super().execute(plan)


class ScriptedLinks:
    """Hands the loop one list of messages a turn, and keeps what it sends."""

    def __init__(self, turns: list[list[Incoming]]) -> None:
        self._turns = turns
        self.sent: list[WorkerToFront] = []

    def poll(self, _timeout: float | None) -> list[Incoming]:
        return self._turns.pop(0)

    def send(self, _front: int, message: WorkerToFront) -> None:
        self.sent.append(message)

    def broadcast(self, message: WorkerToFront) -> None:
        self.sent.append(message)


def test_a_steps_duration_is_what_the_engine_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(loop.time, "monotonic", clock.monotonic)
    engine = ComputingEngine(SimulatedOptions(pipeline_depth=1), clock=clock.monotonic)
    engine.device_clock = clock
    submit = Submit(0, "r", np.arange(1, 9, dtype=np.int32), Sampling(), max_tokens=TOKENS)
    links = ScriptedLinks([[(0, submit)], *[[] for _ in range(TOKENS + 1)], [(0, Ping(7))], [(0, Stop())]])
    worker = loop.WorkerLoop(
        0, engine, SchedulerOptions(), cast(Links, links), Watchdog(1e9), on_served=lambda: None
    )
    worker.run()
    (status,) = [m for m in links.sent if isinstance(m, Status) and m.ticket == 7]
    assert status.steps == TOKENS
    (duration,) = [m for m in status.metrics if m.name == "slipstream:step_duration_seconds"]
    assert duration.histogram is not None
    assert sum(duration.histogram.counts) == TOKENS
    assert duration.histogram.sum == pytest.approx(TOKENS * STEP_S)
