"""Sharing prefixes: cached ones, and ones that another sequence is still computing."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_harness import VOCABULARY, Harness

from engine.interface import StepPlan
from engine.simulated import SimulatedOptions
from worker.messages import FinishReason
from worker.sequence import State

PREFIX = np.random.default_rng(7).integers(0, VOCABULARY, 1000).tolist()


def one_at_a_time(**fields: int) -> SimulatedOptions:
    return SimulatedOptions(pipeline_depth=1, **fields)


def computed(plans: list[StepPlan]) -> int:
    """Prompt tokens run."""
    return sum(len(chunk.tokens) for plan in plans for chunk in plan.prefills)


def cached(harness: Harness, key: int) -> int | None:
    return harness.streams[0, key].cached_tokens


def test_full_pages_of_a_common_prefix_are_computed_once() -> None:
    harness = Harness()
    first = harness.submit([*PREFIX[:200], 1], 3)
    harness.run()
    second = harness.submit([*PREFIX[:200], 2], 3)
    harness.run()
    assert (cached(harness, first), cached(harness, second)) == (0, 192)
    assert computed(harness.plans) == 201 + 9
    stats = harness.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.prompt_tokens) == (402, 192, 402)
    assert stats.prefill_tokens == 210


@pytest.mark.parametrize(("n_prompt", "hit"), [(63, 0), (64, 0), (65, 64), (128, 64), (129, 128)])
def test_of_a_wholly_cached_prompt_the_last_token_is_still_run(n_prompt: int, hit: int) -> None:
    harness = Harness()
    harness.submit(PREFIX[:n_prompt], 1)
    harness.run()
    again = harness.submit(PREFIX[:n_prompt], 4)
    harness.run()
    assert cached(harness, again) == hit
    assert harness.finished(again) is FinishReason.LENGTH


def test_sequences_run_side_by_side_on_shared_pages() -> None:
    harness = Harness(SimulatedOptions(pages=14, slots=8))
    harness.submit([*PREFIX[:320], 1], 1)
    harness.run()
    keys = [harness.submit([*PREFIX[:320], 2, i], 30, seed=i) for i in range(8)]
    harness.run()
    # Apart, they would need 8 × 6 pages.
    assert max(len(plan.decodes) for plan in harness.plans) == 8
    assert all(harness.finished(key) is FinishReason.LENGTH for key in keys)


def test_answers_are_cached_too_for_the_next_turn_of_a_conversation() -> None:
    harness = Harness()
    first = harness.submit(PREFIX[:100], 100)
    harness.run()
    second = harness.submit(PREFIX[:100] + harness.tokens(first) + [5, 6], 3)
    harness.run()
    # 200 tokens, of which the last was never run: three full pages.
    assert cached(harness, second) == 192


def test_the_page_that_a_stop_token_would_fill_is_not_cached() -> None:
    """A stop token is sampled, but never run, so its position holds nothing."""
    options = SimulatedOptions(pipeline_depth=2, stop_one_in=1)
    harness = Harness(options)
    stopping = {"stop_token_ids": frozenset({3})}
    first = harness.submit(PREFIX[:60], 20, min_tokens=3, **stopping)
    harness.run()
    tokens = harness.tokens(first)
    assert tokens[-1] == 3
    assert len(tokens) == 4
    second = harness.submit(PREFIX[:60] + tokens + [1, 2], 3, **stopping)
    harness.run()
    assert cached(harness, second) == 0


def test_different_salts_share_nothing() -> None:
    harness = Harness()
    harness.submit(PREFIX[:200], 1, cache_salt="a")
    harness.run()
    keys = [harness.submit(PREFIX[:200], 1, cache_salt=salt) for salt in ("b", "", "a")]
    harness.run()
    assert [cached(harness, key) for key in keys] == [0, 0, 192]


@pytest.mark.parametrize(
    ("engine", "options"),
    [(SimulatedOptions(prefix_cacheable=False), {}), (SimulatedOptions(), {"prefix_caching": False})],
)
def test_caching_can_be_ruled_out(engine: SimulatedOptions, options: dict[str, bool]) -> None:
    harness = Harness(engine, **options)
    for _ in range(3):
        harness.submit(PREFIX[:200], 2, n=2)
        harness.run()
    stats = harness.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.pages_cached) == (0, 0, 0)
    assert computed(harness.plans) == 6 * 200


def test_prompt_logprobs_need_the_whole_prompt_to_be_run_but_others_share_it() -> None:
    harness = Harness()
    harness.submit(PREFIX[:200], 1)
    harness.run()
    asking = harness.submit(PREFIX[:200], 2, prompt_logprobs=2, n=2)
    harness.run()
    assert (cached(harness, asking), cached(harness, asking + 1)) == (0, 192)
    assert len(harness.streams[0, asking].prompt_logprobs or ()) == 199
    assert harness.streams[0, asking + 1].prompt_logprobs is None


# ---- prefixes in the making


def test_the_prompt_of_several_answers_is_computed_once() -> None:
    harness = Harness(SimulatedOptions(max_step_tokens=256))
    key = harness.submit(PREFIX[:700], 5, n=4, seed=2**64 - 2)
    harness.run()
    assert computed(harness.plans) == 700 + 3 * (700 - 640)
    assert [cached(harness, key + i) for i in range(4)] == [0, 640, 640, 640]
    assert len({tuple(harness.tokens(key + i)) for i in range(4)}) == 4
    seeds = [start.sampling.seed for plan in harness.plans for start in plan.starts]
    assert seeds == [2**64 - 2, 2**64 - 1, 0, 1]
    assert harness.n_stood_aside == 3  # once each, not once per page


def test_a_burst_with_a_common_system_prompt_computes_it_once() -> None:
    harness = Harness(SimulatedOptions(slots=32))
    keys = [harness.submit([*PREFIX[:640], i, i], 2) for i in range(32)]
    harness.run()
    assert computed(harness.plans) == 642 + 31 * 2
    assert all(cached(harness, key) == 640 for key in keys[1:])


def test_those_behind_a_waiting_follower_are_not_held_up() -> None:
    harness = Harness(one_at_a_time(max_step_tokens=128))
    harness.submit(PREFIX[:700], 1)
    follower = harness.submit(PREFIX[:650], 1)
    stranger = harness.submit(30, 1)
    harness.turn()
    harness.turn()
    assert cached(harness, stranger) == 0
    assert cached(harness, follower) is None
    assert harness.scheduler.stats().waiting == 1
    harness.run()
    assert cached(harness, follower) == 640


def test_a_follower_waits_only_for_the_part_it_shares() -> None:
    harness = Harness(one_at_a_time(max_step_tokens=128))
    harness.submit(PREFIX[:900], 1)
    follower = harness.submit([*PREFIX[:130], 1, 2, 3], 1)
    harness.turn()
    assert cached(harness, follower) is None
    harness.turn()
    assert cached(harness, follower) == 128


@pytest.mark.parametrize("mishap", ["abort", "cancel", "pause", "drop", "deadline", "fault"])
def test_if_the_leader_stops_half_way_its_followers_go_on_alone(mishap: str) -> None:
    faults = {3: "broken"}
    engine = one_at_a_time(max_step_tokens=128)
    if mishap == "fault":
        engine = SimulatedOptions(
            pipeline_depth=1, max_step_tokens=128, fault=lambda step, slot: faults.get(step)
        )
    harness = Harness(engine)
    leader = harness.submit(
        PREFIX[:900], 1, front=9, request_id="leader", time_left_s=1.0 if mishap == "deadline" else None
    )
    followers = [harness.submit([*PREFIX[:800], i], 3) for i in range(2)]
    for _ in range(3):
        harness.turn()
    assert [harness.state(key) for key in followers] == [State.WAITING] * 2
    match mishap:
        case "abort":
            harness.abort("leader")
        case "cancel":
            harness.cancel(9, [leader])
        case "pause":
            harness.pause(leader, front=9)
        case "drop":
            harness.drop_front(9)
        case "deadline":
            harness.clock.now += 2
        case "fault":
            harness.turn()
            assert harness.finished(leader, front=9) is FinishReason.FAULT
    harness.run()
    # What the leader had computed until then is of use to the first, and that one's to the second.
    assert [cached(harness, key) for key in followers] == [0 if mishap == "fault" else 384, 768]
    assert all(harness.finished(key) is FinishReason.LENGTH for key in followers)


def test_a_follower_that_is_cancelled_while_it_waits_is_gone() -> None:
    harness = Harness(one_at_a_time(max_step_tokens=128))
    key = harness.submit(PREFIX[:900], 2, n=3)
    harness.turn()
    harness.cancel(0, [key + 1])
    harness.pause(key + 2)
    assert harness.scheduler.stats().waiting == 0
    harness.run()
    assert harness.finished(key) is FinishReason.LENGTH
    harness.pause(key + 2, paused=False)
    harness.run()
    assert harness.finished(key + 2) is FinishReason.LENGTH
    harness.check_all_over()


def test_nobody_waits_for_a_leader_of_lower_priority() -> None:
    harness = Harness(one_at_a_time(max_step_tokens=128))
    harness.submit(PREFIX[:900], 1)
    harness.turn()
    urgent = harness.submit(PREFIX[:900], 1, priority=1)
    harness.turn()
    assert harness.state(urgent) is State.PREFILLING
    harness.run()
    harness.check_all_over()


def test_whoever_computes_a_promised_page_first_lets_the_followers_go() -> None:
    harness = Harness(one_at_a_time(max_step_tokens=128))
    leader = harness.submit(PREFIX[:900], 1)
    harness.turn()
    follower = harness.submit([*PREFIX[:700], 3], 1)
    harness.turn()
    harness.submit(PREFIX[:800], 1, priority=1)
    while harness.state(follower) is State.WAITING:
        harness.turn()
    sequence = harness.scheduler._registry.sequence(0, leader)
    assert sequence is not None
    assert sequence.n_computed < 640
    assert cached(harness, follower) == 640
    harness.run()


# ---- eviction and doubt


def test_cached_pages_give_way_to_new_sequences_and_are_then_computed_again() -> None:
    harness = Harness(SimulatedOptions(pages=8))
    harness.submit(PREFIX[:300], 1)
    harness.run()
    assert harness.scheduler.stats().pages_cached == 4
    harness.submit(500, 1)
    harness.run()
    again = harness.submit(PREFIX[:300], 2)
    harness.run()
    assert cached(harness, again) == 0


def test_what_a_failed_sequence_computed_is_not_shared() -> None:
    fails = [True]
    harness = Harness(
        SimulatedOptions(pipeline_depth=1, fault=lambda step, slot: "NaN" if fails.pop() else None)
    )
    harness.submit(PREFIX[:100], 1)
    fails[:] = [False]
    harness.run()
    fails[:] = [True]
    failing = harness.submit(PREFIX[:300], 5)
    harness.run()
    assert harness.finished(failing) is FinishReason.FAULT
    assert harness.streams[0, failing].fault == "NaN"
    fails[:] = [False] * 10
    again = harness.submit(PREFIX[:300], 5)
    harness.run()
    # Its first page came from the first sequence and is above suspicion.
    assert cached(harness, again) == 64
    assert harness.finished(again) is FinishReason.LENGTH


def test_a_failure_after_many_tokens_takes_the_answers_pages_out_of_the_cache_too() -> None:
    harness = Harness(
        SimulatedOptions(pipeline_depth=2, fault=lambda step, slot: "NaN" if step == 100 else None)
    )
    key = harness.submit(PREFIX[:70], 200)
    harness.run()
    assert harness.finished(key) is FinishReason.FAULT
    assert harness.scheduler.stats().pages_cached == 0
