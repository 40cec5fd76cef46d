"""The small parts around workers: placement, metrics, stage timings, backlog, an answer's record."""

from __future__ import annotations

import math
import pickle
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import factory
from engine.interface import IntArray, Sampling, TokenLogprobs
from engine.options import EngineOptions
from worker import process
from worker.answers import Answer, AnswerFinished, AnswerStarted
from worker.backlog import backlog_size, merge_step_tokens
from worker.messages import Finished, FinishReason, MetricData, ProfileStart, Started, StepTokens
from worker.metrics import LATENCY_BOUNDS_S, Counter, Gauge, Histogram, MetricsRegistry, merge_metrics
from worker.options import WorkerOptions
from worker.placement import Placement
from worker.process import WorkerSpec
from worker.profiling import StageClock


def prompt(pages: int, value: int = 1) -> IntArray:
    return np.full(64 * pages + 3, value, np.int32)


# ---- placement


def test_idle_workers_take_turns() -> None:
    placement = Placement(4.0, 100)
    chosen = {placement.choose({0: 0.0, 1: 0.0, 2: 0.0}, prompt(0), "") for _ in range(3)}
    assert chosen == {0, 1, 2}


def test_the_worker_that_has_the_beginning_is_preferred_until_it_is_too_busy() -> None:
    placement = Placement(4.0, 100)
    home = placement.choose({0: 0.0, 1: 0.0}, prompt(3), "")
    other = 1 - home
    longer = np.concatenate([prompt(3)[:192], np.full(500, 9, np.int32)])
    for _ in range(3):
        assert placement.choose({home: 3.0, other: 0.0}, longer, "") == home
    assert placement.choose({home: 9.0, other: 0.0}, prompt(3), "") == other
    assert placement.choose({home: 119.0, other: 100.0}, prompt(3), "") in (home, other)
    assert placement.choose({home: 0.0, other: 1.0}, prompt(3, value=2), "") == home
    assert placement.choose({home: 1.0, other: 0.0}, prompt(3), "another tenant") == other


def test_the_longest_match_wins_and_memory_is_bounded() -> None:
    placement = Placement(100.0, remembered=3)
    assert placement.choose({0: 0.0, 1: 9.0}, prompt(1), "") == 0
    assert placement.choose({0: 9.0, 1: 0.0}, prompt(8)[:64], "") == 0  # its page is known there
    placement.forget(0)
    assert placement.choose({0: 9.0, 1: 0.0}, prompt(4), "") == 1
    assert placement.choose({0: 0.0, 1: 9.0}, prompt(4), "") == 1
    for value in range(5, 10):
        placement.choose({1: 0.0, 0: 200.0}, prompt(1, value), "")
    assert placement.choose({0: 0.0, 1: 9.0}, prompt(4), "") == 0  # forgotten


# ---- metrics


@given(st.lists(st.floats(0, 100), max_size=50))
def test_a_histogram_counts_every_value_once_where_it_belongs(values: list[float]) -> None:
    histogram = Histogram("h", "", LATENCY_BOUNDS_S)
    for value in values:
        histogram.observe(value, times=3)
    data = histogram.export().histogram
    assert data is not None
    lower = -math.inf
    for bound, count in zip(data.bounds, data.counts, strict=True):
        assert count == 3 * sum(lower < value <= bound for value in values)
        lower = bound
    assert data.sum == pytest.approx(3 * sum(values))


def test_series_add_up_over_processes() -> None:
    def of_process(number: int) -> list[MetricData]:
        registry = MetricsRegistry()
        registry.add(Counter("tokens", "Tokens.")).add(number)
        registry.add(Gauge("waiting", "Waiting.", (("worker", str(number)),))).set(number)
        registry.add(Histogram("seconds", "Seconds.", (1.0, 2.0))).observe(number)
        return pickle.loads(pickle.dumps(registry.export()))

    merged = {(metric.name, metric.labels): metric for metric in merge_metrics(map(of_process, (1, 2, 3)))}
    assert merged["tokens", ()].value == 6
    assert [merged["waiting", (("worker", str(number)),)].value for number in (1, 2, 3)] == [1, 2, 3]
    assert merged["seconds", ()].histogram is not None
    assert merged["seconds", ()].histogram.counts == (1, 1, 1)
    assert merged["seconds", ()].histogram.sum == 6


def test_series_that_do_not_fit_are_not_added() -> None:
    counter, gauge = Counter("same", "").export(), Gauge("same", "").export()
    with pytest.raises(ValueError, match="both a counter and a gauge"):
        merge_metrics([[counter], [gauge]])
    histograms = [[Histogram("h", "", bounds).export()] for bounds in ((1.0,), (2.0,))]
    with pytest.raises(ValueError, match="two sets of bounds"):
        merge_metrics(histograms)


# ---- stage timings


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_stages_share_out_the_time_of_a_step() -> None:
    clock = Clock()
    stages = StageClock(clock)

    def step(waits_s: float) -> None:
        clock.now += waits_s
        stages.begin()
        for stage in ("schedule", "execute", "schedule"):
            clock.now += 0.25
            stages.lap(stage)
        stages.end_step({"attention": 7.0})

    step(1)
    stages.start(4, ProfileStart(1, steps=3, timeout_s=100))
    stages.start(5, ProfileStart(2, steps=100, timeout_s=20))
    for waits_s in (1, 2, 3):
        step(waits_s)
    ((front, done),) = stages.finished()
    assert (front, done.ticket, done.steps) == (4, 1, 3)
    totals = {stage.stage: stage.total for stage in done.stages}
    assert totals == {"schedule": 1.5e6, "execute": 0.75e6, "attention": 21.0}
    deadline = stages.next_deadline()
    assert deadline is not None
    clock.now = deadline
    ((front, done),) = stages.finished()
    assert (front, done.steps) == (5, 3)
    assert stages.next_deadline() is None


# ---- backlog


def logprob(alternatives: int) -> TokenLogprobs:
    return TokenLogprobs(-1.0, 1, tuple(range(alternatives)), (-1.0,) * alternatives)


def test_waiting_step_messages_become_one() -> None:
    first = StepTokens([1, 2], [1, 2], [10, 20, 21], logprobs={1: [logprob(2)]}, started=[Started(1, 0, 0.1)])
    second = StepTokens(
        [2, 1],
        [1, 1],
        [22, 11],
        logprobs={1: [logprob(2)], 3: [logprob(0)]},
        prompt_logprobs={2: [logprob(1)] * 4},
        finished=[Finished(1, FinishReason.LENGTH)],
    )
    assert merge_step_tokens(first, second)
    assert (first.keys, first.counts, first.tokens) == ([1, 2, 2, 1], [1, 2, 1, 1], [10, 20, 21, 22, 11])
    assert first.started
    assert first.finished
    assert {key: len(values) for key, values in first.logprobs.items()} == {1: 2, 3: 1}
    assert backlog_size([first]) == 5 + 2 * 3 + 1 + 4 * 2


# ---- an answer's record


def test_an_update_tells_everything_once() -> None:
    answer = Answer(index=3, key=103)
    answer.started = AnswerStarted(64, 0.5)
    answer.append([7, 8])
    answer.add_logprobs([logprob(0), logprob(1)])
    update = answer.take_update()
    assert (update.index, update.tokens, len(update.logprobs)) == (3, [7, 8], 2)
    assert update.started == AnswerStarted(64, 0.5)
    answer.append([9])
    answer.finished = AnswerFinished(FinishReason.LENGTH)
    assert answer.unread == 1
    update = answer.take_update()
    assert (update.tokens, update.logprobs, update.started) == ([9], [], None)
    assert update.finished is not None
    output = answer.output()
    assert output is not None
    assert output.tolist() == [7, 8, 9]


def test_a_resubmitted_answer_keeps_its_own_seed() -> None:
    sampling = Sampling(seed=2**64 - 2, prompt_logprobs=3)
    first, third = Answer(0, 0), Answer(2, 2)
    assert first.sampling(sampling, has_prompt_logprobs=False) == sampling
    assert first.sampling(sampling, has_prompt_logprobs=True).prompt_logprobs is None
    assert third.sampling(sampling, has_prompt_logprobs=False) == Sampling(seed=0)


# ---- loading


def test_too_little_memory_is_told_at_once_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_engine(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(factory, "load_engine", load_engine)
    ours, workers = Pipe()
    options = WorkerOptions(EngineOptions(model=Path("m")))
    with pytest.raises(SystemExit):
        process._load(WorkerSpec(0, 0, options, "", b""), workers)
    failed = ours.recv()
    assert failed.is_user_error
    assert "memory" in failed.message
