"""The worker's loop, turn by turn, with scripted messages in place of connections."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from engine.interface import Sampling, StepHandle, StepPlan
from engine.simulated import SimulatedEngine, SimulatedOptions
from worker import loop
from worker.links import Incoming, Links
from worker.messages import Ping, SetPaused, Status, StepTokens, Submit, WorkerToFront
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


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_after_a_halt_only_the_steps_under_way_bring_tokens(depth: int) -> None:
    """What a client that does not read can have gathered beyond its bound, once the worker knows."""
    engine = SimulatedEngine(SimulatedOptions(pipeline_depth=depth))
    submit = Submit(0, "r", np.arange(1, 9, dtype=np.int32), Sampling(), max_tokens=1_000)
    before, after = 20, 50
    turns: list[list[Incoming]] = [[] for _ in range(before + after)]
    turns[0] = [(0, submit)]
    turns[before] = [(0, SetPaused(0, True))]
    links = ScriptedLinks([*turns, [(0, Ping(7))], [(0, Stop())]])
    tokens_at_turn: list[int] = []
    poll = links.poll

    def counting_poll(timeout: float | None) -> list[Incoming]:
        tokens_at_turn.append(sum(len(m.tokens) for m in links.sent if isinstance(m, StepTokens)))
        return poll(timeout)

    links.poll = counting_poll  # type: ignore[method-assign]
    loop.WorkerLoop(
        0, engine, SchedulerOptions(), cast(Links, links), Watchdog(1e9), on_served=lambda: None
    ).run()
    assert tokens_at_turn[before] >= before - depth - 1
    assert tokens_at_turn[-1] - tokens_at_turn[before] <= depth
    (status,) = [m for m in links.sent if isinstance(m, Status) and m.ticket == 7]
    assert (status.running, status.paused) == (0, 1)
    assert status.pages_free + status.pages_cached == status.pages
