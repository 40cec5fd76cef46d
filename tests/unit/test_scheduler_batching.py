"""What goes into a step: decode rows, chunks of several prompts, starts and pages; and how steps overlap."""

from __future__ import annotations

import itertools
import sys
from types import FrameType

import pytest
from scheduler_harness import Harness

from engine.interface import StepPlan
from engine.simulated import SimulatedOptions
from worker.messages import FinishReason


def prefilled(plan: StepPlan) -> dict[int, int]:
    """Tokens by slot."""
    return {chunk.slot: len(chunk.tokens) for chunk in plan.prefills}


def n_tokens(plan: StepPlan) -> int:
    return sum(prefilled(plan).values()) + len(plan.decodes)


def depth(steps: int, **fields: int) -> SimulatedOptions:
    return SimulatedOptions(pipeline_depth=steps, **fields)


# ---- budget and chunks


def test_a_short_prompt_takes_one_step_and_then_decodes() -> None:
    harness = Harness(depth(1))
    key = harness.submit(10, 3)
    harness.run()
    assert [prefilled(plan) for plan in harness.plans] == [{0: 10}, {}, {}]
    assert [plan.decodes for plan in harness.plans] == [(), (0,), (0,)]
    assert harness.finished(key) is FinishReason.LENGTH


def test_every_step_keeps_to_the_budget_and_never_leaves_out_a_decode_row() -> None:
    harness = Harness(SimulatedOptions(slots=8, max_step_tokens=200))
    running = [harness.submit(5, 60) for _ in range(4)]
    for _ in range(6):
        harness.turn()
    harness.submit(900, 3)
    harness.submit(150, 3)
    n_plans = len(harness.plans)
    while all(harness.finished(key) is None for key in running):
        harness.turn()
    for plan in harness.plans[n_plans:-2]:
        assert n_tokens(plan) <= 200
        assert len(plan.decodes) >= 4
    assert max(map(n_tokens, harness.plans)) > 190


def test_a_long_prompt_is_cut_at_page_ends() -> None:
    harness = Harness(SimulatedOptions(slots=4, max_step_tokens=200))
    harness.submit(5, 100)
    harness.submit(700, 2)
    harness.run()
    chunks = [chunk for plan in harness.plans for chunk in plan.prefills if len(chunk.tokens) > 5]
    assert [chunk.start for chunk in chunks] == [0, 192, 384, 576]
    assert [len(chunk.tokens) for chunk in chunks] == [192, 192, 192, 124]
    assert [chunk.is_last for chunk in chunks] == [False, False, False, True]


def test_a_budget_smaller_than_a_page_still_gets_a_prompt_through() -> None:
    harness = Harness(SimulatedOptions(slots=3, max_step_tokens=24))
    harness.submit(5, 100)
    harness.submit(5, 100)
    key = harness.submit(150, 2)
    harness.run()
    assert harness.finished(key) is FinishReason.LENGTH
    # Never less than was left, and aligned to the page's end where that is near.
    chunks = [len(c.tokens) for plan in harness.plans for c in plan.prefills if c.slot == 2]
    assert sum(chunks) == 150
    assert len(chunks) <= 11


def test_a_burst_of_prompts_shares_steps() -> None:
    harness = Harness(SimulatedOptions(slots=64, max_step_tokens=2048))
    keys = [harness.submit(100, 4) for _ in range(64)]
    harness.run()
    first = harness.plans[0]
    assert len(first.prefills) >= 20
    assert sum(prefilled(first).values()) > 1900
    # No slivers: what does not finish its prompt ends at a page's end.
    chunks = [chunk for plan in harness.plans for chunk in plan.prefills]
    assert all(chunk.is_last or (chunk.start + len(chunk.tokens)) % 64 == 0 for chunk in chunks)
    # 6,400 tokens at 2,048 a step.
    assert max(i for i, plan in enumerate(harness.plans) if plan.prefills) <= 4
    assert all(harness.finished(key) is FinishReason.LENGTH for key in keys)


def test_a_short_prompt_does_not_wait_for_the_long_one_before_it() -> None:
    harness = Harness(depth(1, slots=4, max_step_tokens=512, pages=4096, max_sequence_length=60_000))
    harness.submit(50_000, 2)
    harness.turn()
    short = harness.submit(100, 1)
    harness.turn()
    assert harness.finished(short) is FinishReason.LENGTH
    # And while alone, the long one has the whole budget.
    assert prefilled(harness.plans[0]) == {0: 512}
    harness.turn()
    assert prefilled(harness.plans[2]) == {0: 512}


def test_the_long_prompt_goes_on_while_short_ones_keep_coming() -> None:
    harness = Harness(depth(1, slots=8, max_step_tokens=512, max_sequence_length=8000))
    long = harness.submit(6000, 1)
    for _ in range(6000 // 256 + 1):
        for _ in range(4):
            harness.submit(250, 1)
        harness.turn()
    assert harness.finished(long) is FinishReason.LENGTH


def test_prompts_of_equal_length_finish_nearly_one_by_one() -> None:
    """Sliced evenly, all eight would finish last."""
    harness = Harness(depth(1, slots=8, max_step_tokens=1024))
    keys = [harness.submit(1024, 1) for _ in range(8)]
    ends = []
    for turn in range(1, 20):
        harness.turn()
        ends += [turn] * (sum(harness.finished(key) is not None for key in keys) - len(ends))
    assert len(ends) == 8
    assert ends[0] <= 2
    assert ends[-1] == 8
    assert sum(ends) / 8 <= 6


@pytest.mark.parametrize(
    ("advice", "choice", "limit"), [(None, 128, 128), (128, None, 128), (64, 128, 128), (128, 64, 64)]
)
def test_prompt_tokens_beside_decode_rows_are_limited_by_choice_or_else_the_engines_advice(
    advice: int | None, choice: int | None, limit: int
) -> None:
    options = SimulatedOptions(slots=4, prefill_tokens_beside_decodes=advice)
    harness = Harness(options, prefill_tokens_beside_decodes=choice)
    harness.submit(500, 50)
    harness.turn()
    assert prefilled(harness.plans[0]) == {0: 500}
    harness.submit(1000, 2)
    harness.run()
    beside = [sum(prefilled(plan).values()) for plan in harness.plans[1:] if plan.decodes]
    assert max(beside) == limit


def test_alternating_steps_either_prefill_or_decode_in_turns() -> None:
    harness = Harness(
        SimulatedOptions(slots=4, max_step_tokens=256, max_sequence_length=3000), prefill_policy="alternating"
    )
    keys = [harness.submit(10, 40), harness.submit(2000, 3)]
    harness.run()
    kinds = ["P" if plan.prefills else "D" for plan in harness.plans]
    assert not any(plan.prefills and plan.decodes for plan in harness.plans)
    last_prefill = len(kinds) - 1 - kinds[::-1].index("P")
    assert "PP" not in "".join(kinds[1 : last_prefill + 1])
    assert "DD" not in "".join(kinds[1 : last_prefill + 1])
    assert all(harness.finished(key) is FinishReason.LENGTH for key in keys)


# ---- order


def test_higher_priority_starts_first_then_arrival() -> None:
    harness = Harness(depth(1, slots=1))
    first = harness.submit(10, 2)
    harness.turn()
    low = harness.submit(10, 2, priority=-1)
    normal = [harness.submit(10, 2) for _ in range(2)]
    high = harness.submit(10, 2, priority=5)
    order = []
    while harness.turn():
        for message in harness.messages.pop().values():
            order += [finished.key for finished in message.finished]
    assert order == [first, high, *normal, low]


def test_a_prompt_of_higher_priority_gets_the_budget_before_one_half_done() -> None:
    harness = Harness(depth(1, slots=4, max_step_tokens=256))
    harness.submit(2000, 1)
    harness.turn()
    urgent = harness.submit(500, 1, priority=1)
    harness.turn()
    harness.turn()
    assert prefilled(harness.plans[1]) == {1: 256}
    assert harness.finished(urgent) is FinishReason.LENGTH


def test_nobody_passes_the_first_in_line_that_waits_for_pages() -> None:
    harness = Harness(depth(1, slots=4, pages=10))
    harness.submit(400, 60)
    harness.turn()
    big = harness.submit(400, 5)
    small = harness.submit(10, 1)
    while harness.finished(big) is None:
        harness.turn()
        if harness.state(big) is not None and harness.streams[0, big].cached_tokens is None:
            assert harness.streams[0, small].cached_tokens is None
    harness.run()
    assert harness.finished(small) is FinishReason.LENGTH


def test_growing_sequences_keep_some_pages_from_newcomers() -> None:
    """A newcomer that took the last page would be pushed out again at once."""
    harness = Harness(depth(1, slots=4, pages=32))
    harness.submit(1950, 60)  # on 31 pages, and soon on all 32
    harness.turn()
    newcomer = harness.submit(10, 50)
    harness.run()
    assert harness.finished(newcomer) is FinishReason.LENGTH
    assert harness.scheduler.stats().preemptions == 0


# ---- pages, slots and steps under way


def test_a_decoding_sequence_gets_a_page_every_64_tokens_and_no_other() -> None:
    harness = Harness(depth(1))
    harness.submit(60, 200)
    harness.run()
    assigned = [(plan.step, a.index) for plan in harness.plans for a in plan.pages]
    assert assigned == [(0, 0), (5, 1), (69, 2), (133, 3), (197, 4)]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_as_many_steps_may_be_under_way_as_the_engine_likes(steps: int) -> None:
    harness = Harness(depth(steps))
    harness.submit(10, 20)
    for n in range(steps):
        assert harness.plan() is not None
        assert harness.steps_under_way == n + 1
    assert harness.plan() is None
    harness.collect()
    assert harness.plan() is not None
    harness.collect_all()
    harness.run()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_no_step_is_planned_beyond_max_tokens(steps: int) -> None:
    harness = Harness(depth(steps))
    harness.submit(10, 7)
    harness.submit(10, 1)
    harness.run()
    assert sum(len(plan.decodes) for plan in harness.plans) == 6
    assert len(harness.plans) == 7


def test_slot_and_pages_of_a_sequence_whose_last_token_is_under_way_go_to_the_next() -> None:
    harness = Harness(depth(2, slots=1, pages=2))
    harness.submit(100, 1)
    second = harness.submit(100, 1)
    harness.plan()
    plan = harness.plan()
    assert plan is not None
    assert plan.releases == (0,)
    assert [start.slot for start in plan.starts] == [0]
    harness.collect_all()
    assert harness.finished(second) is FinishReason.LENGTH


def test_rows_planned_after_an_unforeseen_stop_give_nothing() -> None:
    harness = Harness(SimulatedOptions(pipeline_depth=3, stop_one_in=5))
    keys = [harness.submit(10, 100, seed=seed, stop_token_ids=frozenset({3})) for seed in range(16)]
    harness.run()
    assert {harness.finished(key) for key in keys} == {FinishReason.STOP_TOKEN}
    harness.check_all_over()


def test_a_plan_is_none_when_there_is_nothing_to_do() -> None:
    harness = Harness()
    assert harness.plan() is None
    assert harness.is_idle
    assert not harness.has_work
    key = harness.submit(10, 1)
    assert harness.has_work
    harness.pause(key)
    assert harness.plan() is None
    assert not harness.has_work
    assert not harness.is_idle


def test_a_decode_step_costs_a_fixed_number_of_calls_however_many_sequences_run() -> None:
    """At hundreds of steps a second on cores shared with clients, a call per row would show."""

    def calls_of_a_step(slots: int) -> int:
        harness = Harness(SimulatedOptions(slots=slots, pipeline_depth=1, validate=False))
        for _ in range(slots):
            harness.submit(10, 50)
        for _ in range(4):
            harness.turn()
        calls = itertools.count()

        def count(frame: FrameType, event: str, argument: object) -> None:
            if event in ("call", "c_call"):
                next(calls)

        engine, scheduler = harness.engine, harness.scheduler
        sys.setprofile(count)
        plan = scheduler.plan()
        sys.setprofile(None)
        assert plan is not None
        assert len(plan.decodes) == slots
        result = engine.execute(plan).result()
        sys.setprofile(count)
        scheduler.collect(result)
        outputs = scheduler.take_outputs()
        sys.setprofile(None)
        assert len(outputs[0].tokens) == slots
        return next(calls)

    # Three list appends a row are all that a token may cost.
    assert calls_of_a_step(64) - calls_of_a_step(32) <= 4 * 32
    assert calls_of_a_step(1) <= 80
