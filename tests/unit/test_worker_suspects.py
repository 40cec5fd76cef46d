"""Who is to blame for a worker's death: the front's verdicts and the worker's line of suspects."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from engine.interface import Sampling
from worker.messages import Finished, FinishReason, RejectReason, StepTokens, Submit
from worker.quarantine import Quarantine
from worker.reports import WorkerDeath
from worker.suspects import Suspicion

CRASH = WorkerDeath(0, 1)
KILLED = WorkerDeath(0, -signal.SIGKILL)


def on_trial(suspicion: Suspicion, proof: int = 2) -> None:
    suspicion.submitted()
    suspicion.trial_started(proof)


def test_a_first_death_makes_a_suspect() -> None:
    suspicion = Suspicion()
    assert suspicion.worker_died(CRASH, 10) is None
    assert suspicion.is_suspect


@pytest.mark.parametrize("death", [CRASH, None, WorkerDeath(0, -signal.SIGSEGV)])
def test_a_death_on_trial_convicts(death: WorkerDeath | None) -> None:
    suspicion = Suspicion()
    suspicion.worker_died(CRASH, 10)
    on_trial(suspicion)
    suspicion.got_tokens(1)
    assert "both times" in (suspicion.worker_died(death, 10) or "")


def test_killing_from_outside_convicts_at_the_second_trial_only() -> None:
    suspicion = Suspicion()
    suspicion.worker_died(KILLED, 10)
    on_trial(suspicion)
    assert suspicion.worker_died(KILLED, 10) is None
    on_trial(suspicion)
    assert suspicion.worker_died(KILLED, 10) is not None


def test_a_suspect_in_line_has_nothing_to_do_with_the_next_death() -> None:
    suspicion = Suspicion()
    suspicion.worker_died(CRASH, 10)
    for _ in range(20):
        suspicion.submitted()
        assert suspicion.worker_died(CRASH, 10) is None
    assert suspicion.deaths == 1
    assert suspicion.is_suspect


def test_proof_clears_a_suspect_but_deaths_count_on() -> None:
    suspicion = Suspicion()
    for deaths in range(1, 10):
        assert suspicion.worker_died(KILLED, 10) is None
        assert suspicion.deaths == deaths
        on_trial(suspicion)
        suspicion.got_tokens(1)
        assert suspicion.is_suspect
        suspicion.got_tokens(1)
        assert not suspicion.is_suspect
        suspicion.submitted()
    assert "died 10 times" in (suspicion.worker_died(KILLED, 10) or "")


# ---- the worker's line


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def submit(key: int, *, suspect: bool, n: int = 1, time_left_s: float | None = None) -> Submit:
    return Submit(
        key,
        f"request-{key}",
        np.ones(1, np.int32),
        Sampling(),
        10,
        n=n,
        time_left_s=time_left_s,
        is_suspect=suspect,
        is_resubmission=suspect,
    )


def line(*submits: Submit, max_newcomers: int = 100) -> Quarantine:
    quarantine = Quarantine(2, max_newcomers, Clock())
    for each in submits:
        assert quarantine.hold(0, each) is None
    return quarantine


def released(quarantine: Quarantine) -> list[int]:
    return [each.key for _, each in quarantine.releases()]


def tokens(key: int, count: int) -> StepTokens:
    return StepTokens([key], [count], [5] * count)


def test_suspects_go_one_by_one_and_newcomers_after_the_last() -> None:
    quarantine = line(
        submit(9, suspect=False), submit(1, suspect=True), submit(2, suspect=True), submit(10, suspect=False)
    )
    assert quarantine.sequences_held == 4
    assert released(quarantine) == [1]
    assert released(quarantine) == []
    quarantine.observe(0, tokens(1, 1))
    quarantine.observe(1, tokens(1, 5))  # another front's key
    quarantine.observe(0, tokens(7, 5))
    assert released(quarantine) == []
    quarantine.observe(0, tokens(1, 1))
    assert released(quarantine) == [2]
    assert not quarantine.is_quiet
    quarantine.observe(0, StepTokens([], [], [], finished=[Finished(2, FinishReason.LENGTH)]))
    assert released(quarantine) == [9, 10]
    assert quarantine.is_quiet


def test_a_trial_ends_with_whatever_ends_its_sequence() -> None:
    quarantine = line(*(submit(key, suspect=True) for key in range(1, 6)))
    assert released(quarantine) == [1]
    quarantine.cancel(0, (1,))
    assert released(quarantine) == [2]
    quarantine.end_trial(0, (2,))
    quarantine.cancel(0, (4,))
    assert released(quarantine) == [3]
    assert [held.submit.key for held in quarantine.abort("request-5")] == [5]
    quarantine.drop_front(1)
    assert not quarantine.is_quiet
    quarantine.drop_front(0)
    assert quarantine.is_quiet


def test_a_gone_fronts_requests_leave_the_line() -> None:
    quarantine = line(submit(1, suspect=True))
    quarantine.hold(1, submit(1, suspect=True))
    quarantine.drop_front(0)
    assert [(front, each.key) for front, each in quarantine.releases()] == [(1, 1)]


def test_newcomers_in_line_are_limited_and_suspects_are_not() -> None:
    quarantine = line(submit(1, suspect=True), submit(2, suspect=False, n=3), max_newcomers=4)
    rejected = quarantine.hold(0, submit(5, suspect=False, n=2))
    assert rejected is not None
    assert (rejected.key, rejected.reason) == (5, RejectReason.QUEUE_FULL)
    assert quarantine.hold(0, submit(7, suspect=True)) is None


def test_time_runs_on_in_line() -> None:
    clock = Clock()
    quarantine = Quarantine(2, 10, clock)
    for key, left in enumerate((5.0, 1.0, None)):
        quarantine.hold(0, submit(key, suspect=True, time_left_s=left))
    clock.now += 2.0
    left_over = []
    for _ in range(3):
        ((_, each),) = quarantine.releases()
        left_over.append(each.time_left_s)
        quarantine.end_trial(0, (each.key,))
    assert left_over == [3.0, 0.0, None]
