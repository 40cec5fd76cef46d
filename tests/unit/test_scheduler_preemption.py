"""When pages run out: who gives way, and that nothing is lost, repeated or stuck."""

from __future__ import annotations

import pytest
from scheduler_harness import Harness

from engine.simulated import SimulatedOptions
from worker.messages import FinishReason
from worker.sequence import State

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


@DEPTHS
def test_the_youngest_gives_way_and_goes_on_later_without_a_lost_or_repeated_token(depth: int) -> None:
    harness = Harness(SimulatedOptions(slots=3, pages=6, pipeline_depth=depth))
    keys = [harness.submit(60, 120, seed=i, logprobs=1) for i in range(3)]
    harness.run()
    assert all(len(harness.tokens(key)) == 120 for key in keys)
    preemptions = [harness.streams[0, key].preemptions for key in keys]
    assert preemptions[0] == 0
    assert preemptions[2] >= 1
    assert sum(preemptions) == harness.scheduler.stats().preemptions
    assert all(len(harness.streams[0, key].logprobs) == 120 for key in keys)


def test_the_lowest_priority_gives_way_before_the_youngest() -> None:
    harness = Harness(SimulatedOptions(slots=3, pages=6))
    low = harness.submit(60, 120)
    high = [harness.submit(60, 120, priority=1) for _ in range(2)]
    harness.run()
    assert harness.streams[0, low].preemptions >= 1
    assert harness.streams[0, high[0]].preemptions == 0
    assert harness.streams[0, low].finished is FinishReason.LENGTH


@DEPTHS
def test_tokens_under_way_when_a_sequence_gives_way_still_arrive(depth: int) -> None:
    harness = Harness(SimulatedOptions(slots=2, pages=3, pipeline_depth=depth))
    harness.submit(60, 100)
    younger = harness.submit(60, 100)
    while harness.scheduler.stats().preemptions == 0:
        harness.turn()
    n_planned = sum(
        sum(1 for slot in plan.decodes if slot == 1) + any(c.slot == 1 and c.is_last for c in plan.prefills)
        for plan in harness.plans
    )
    harness.collect_all()
    assert harness.state(younger) is State.WAITING
    assert len(harness.tokens(younger)) == n_planned


@DEPTHS
def test_two_that_do_not_fit_together_both_finish(depth: int) -> None:
    """Each needs all pages but one in the end. The elder is never pushed out, so it finishes."""
    harness = Harness(SimulatedOptions(slots=2, pages=6, pipeline_depth=depth))
    keys = [harness.submit(10, 300, seed=i) for i in range(2)]
    harness.run(2000)
    assert [harness.finished(key) for key in keys] == [FinishReason.LENGTH] * 2
    assert harness.streams[0, keys[0]].preemptions == 0


def test_many_that_do_not_fit_together_all_finish_in_reasonable_time() -> None:
    harness = Harness(SimulatedOptions(slots=8, pages=10, pipeline_depth=2))
    keys = [harness.submit(100, 300, seed=i) for i in range(8)]
    harness.run(10_000)
    assert all(harness.finished(key) is FinishReason.LENGTH for key in keys)
    # One after the other would be 8 × 300 steps.
    assert len(harness.plans) < 8 * 300
    assert harness.scheduler.stats().preemptions < 40


def test_a_preempted_sequence_comes_back_before_those_that_came_after_it() -> None:
    harness = Harness(SimulatedOptions(slots=2, pages=6, pipeline_depth=1))
    harness.submit(150, 100)
    younger = harness.submit(150, 100)
    while harness.scheduler.stats().preemptions == 0:
        harness.turn()
    late = harness.submit(10, 1)
    while harness.state(younger) is State.WAITING:
        harness.turn()
        if harness.state(younger) is State.WAITING:
            assert harness.state(late) is State.WAITING
    harness.run()


def test_recomputation_starts_from_the_pages_that_are_still_cached() -> None:
    harness = Harness(SimulatedOptions(slots=2, pages=10, pipeline_depth=1))
    harness.submit(250, 130)
    harness.submit(250, 130)
    harness.run()
    restarts = [start for plan in harness.plans[1:] for start in plan.starts if len(start.output)]
    assert restarts
    again = next(
        chunk
        for plan in harness.plans
        for chunk in plan.prefills
        if plan.starts and len(plan.starts[0].output)
    )
    assert again.start > 0


def test_preemption_in_the_middle_of_prompt_logprobs_delivers_them_whole_and_once() -> None:
    harness = Harness(SimulatedOptions(slots=2, pages=8, max_step_tokens=64, pipeline_depth=2))
    harness.submit(60, 200)
    for _ in range(60):
        harness.turn()
    asking = harness.submit(300, 3, prompt_logprobs=1)
    while harness.state(asking) is not State.PREFILLING:
        harness.turn()
    harness.turn()
    harness.pause(asking)
    harness.turn()
    harness.pause(asking, paused=False)
    harness.run()
    assert len(harness.streams[0, asking].prompt_logprobs or ()) == 299
    assert harness.finished(asking) is FinishReason.LENGTH


@pytest.mark.parametrize("turns", range(1, 9))
def test_prompt_logprobs_survive_a_halt_at_any_step(turns: int) -> None:
    harness = Harness(SimulatedOptions(slots=1, max_step_tokens=64, pipeline_depth=3))
    key = harness.submit(200, 6, prompt_logprobs=0, logprobs=2)
    for _ in range(turns):
        harness.turn()
    harness.pause(key)
    harness.pause(key, paused=False)
    harness.run()
    assert len(harness.tokens(key)) == 6
    assert len(harness.streams[0, key].prompt_logprobs or ()) == 199
