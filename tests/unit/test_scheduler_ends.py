"""Ends, halts and what fronts hear of them: abort, cancel, deadline, pause, fronts that go away, faults."""

from __future__ import annotations

import pytest
from scheduler_harness import FakeClock, Harness

from engine.interface import EngineCapacity
from engine.simulated import SimulatedOptions
from worker.messages import FinishReason
from worker.scheduler import Scheduler, SchedulerOptions
from worker.sequence import State


def running(depth: int = 2, **fields: object) -> tuple[Harness, int]:
    """A harness in which one sequence has a few tokens already, and some more under way."""
    harness = Harness(SimulatedOptions(slots=2, pages=8, pipeline_depth=depth))
    key = harness.submit(100, 200, request_id="it", **fields)
    for _ in range(6):
        harness.turn()
    assert isinstance(key, int)
    assert 0 < len(harness.tokens(key)) < 200
    assert harness.scheduler.stats().running == 1
    return harness, key


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("how", ["abort", "cancel", "deadline", "drop"])
def test_a_running_sequence_ends_at_once_and_gives_everything_back(how: str, depth: int) -> None:
    harness, key = running(depth, time_left_s=10.0)
    match how:
        case "abort":
            assert harness.abort("it")
        case "cancel":
            harness.cancel(0, [key])
        case "deadline":
            harness.clock.now += 10
        case "drop":
            harness.drop_front(0)
    assert harness.plan() is None
    stats = harness.scheduler.stats()
    assert stats.running == 0
    assert stats.pages_free + stats.pages_cached == stats.pages
    harness.take()
    expected = {"abort": FinishReason.ABORTED, "deadline": FinishReason.DEADLINE}.get(how)
    assert harness.finished(key) is expected
    harness.collect_all()  # what was under way for it is not told
    harness.check_all_over()


@pytest.mark.parametrize("how", ["abort", "cancel", "deadline", "drop"])
def test_a_queued_sequence_ends_at_once(how: str) -> None:
    harness = Harness(SimulatedOptions(slots=1, pipeline_depth=1))
    harness.submit(10, 50, front=1)
    harness.turn()
    key = harness.submit(10, 5, n=2, request_id="it", time_left_s=3.0)
    match how:
        case "abort":
            assert harness.abort("it")
        case "cancel":
            harness.cancel(0, [key, key + 1])
        case "deadline":
            assert harness.scheduler.next_deadline() == harness.clock.now + 3
            harness.clock.now += 3
        case "drop":
            harness.drop_front(0)
    harness.turn()
    assert harness.scheduler.stats().waiting == 0
    expected = {"abort": FinishReason.ABORTED, "deadline": FinishReason.DEADLINE}.get(how)
    assert harness.finished(key) is harness.finished(key + 1) is expected
    harness.run()
    harness.check_all_over()


def test_a_deadline_that_is_not_yet_there_ends_nothing() -> None:
    harness, key = running(time_left_s=10.0)
    harness.clock.now += 9.99
    harness.turn()
    assert harness.finished(key) is None
    harness.run()
    assert harness.finished(key) is FinishReason.LENGTH
    assert harness.scheduler.next_deadline() is None


def test_a_deadline_that_has_passed_on_arrival_runs_nothing() -> None:
    harness = Harness()
    key = harness.submit(10, 5, time_left_s=-1.0)
    assert not harness.turn()
    assert harness.finished(key) is FinishReason.DEADLINE
    assert harness.plans == []


def test_the_next_deadline_is_the_earliest_of_those_that_live() -> None:
    harness = Harness()
    now = harness.clock.now
    assert harness.scheduler.next_deadline() is None
    harness.submit(10, 500, time_left_s=30.0)
    harness.submit(10, 500, time_left_s=10.0, request_id="soon")
    harness.submit(10, 500)
    assert harness.scheduler.next_deadline() == now + 10
    harness.abort("soon")
    assert harness.scheduler.next_deadline() == now + 30


def test_abort_ends_all_answers_and_tells_whether_it_found_any() -> None:
    harness = Harness(SimulatedOptions(slots=2))
    key = harness.submit(10, 50, n=4, request_id="it", front=3)
    harness.turn()
    assert harness.abort("it")
    assert not harness.abort("it")
    harness.run()
    assert all(harness.finished(key + i, front=3) is FinishReason.ABORTED for i in range(4))


def test_of_cancelled_sequences_nothing_more_is_told_not_even_what_was_collected() -> None:
    harness, key = running()
    harness.scheduler.collect(harness._handles.popleft().result())
    harness.cancel(0, [key, 12345])
    assert harness.scheduler.take_outputs() == {}


def test_a_cancel_that_crosses_the_end_silences_the_end() -> None:
    harness = Harness(SimulatedOptions(pipeline_depth=1))
    key = harness.submit(10, 1)
    other = harness.submit(10, 1)
    harness.plan()
    harness.collect()
    harness.cancel(0, [key])
    (message,) = harness.take().values()
    assert message.keys == [other]
    assert [finished.key for finished in message.finished] == [other]


def test_cancel_of_an_unknown_front_or_key_does_nothing() -> None:
    harness, key = running()
    harness.scheduler.cancel(77, [key])
    harness.scheduler.cancel(0, [key + 1])
    harness.scheduler.set_paused(77, key, True)
    harness.scheduler.set_paused(0, key + 1, True)
    harness.scheduler.drop_front(77)
    harness.run()
    assert harness.finished(key) is FinishReason.LENGTH


def test_a_front_that_goes_away_does_not_touch_the_others() -> None:
    harness = Harness(SimulatedOptions(slots=4))
    mine = harness.submit(10, 30, front=1)
    harness.submit(10, 30, front=2, n=3)
    harness.turn()
    harness.drop_front(2)
    assert harness.scheduler.stats().running == 1
    harness.run()
    assert harness.finished(mine, front=1) is FinishReason.LENGTH
    assert 2 not in harness.scheduler._registry.fronts
    back = harness.submit(10, 3, front=2)
    harness.run()
    assert harness.finished(back, front=2) is FinishReason.LENGTH


def test_finish_all_ends_whatever_there_is_with_a_reason_and_what_was_collected() -> None:
    harness = Harness(SimulatedOptions(slots=2, pipeline_depth=2))
    keys = [harness.submit(10, 30) for _ in range(4)]
    harness.turn()
    harness.pause(keys[0])
    harness.turn()
    for stream in harness.streams.values():
        stream.was_aborted = True
    harness.scheduler.finish_all(FinishReason.ABORTED, "stopping")
    harness.collect_all()
    assert all(harness.finished(key) is FinishReason.ABORTED for key in keys)
    assert all(harness.streams[0, key].fault == "stopping" for key in keys)
    harness.check_all_over()


# ---- pause


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_paused_sequence_holds_nothing_and_goes_on_where_it_was(depth: int) -> None:
    harness, key = running(depth)
    harness.pause(key)
    harness.pause(key)  # twice is once
    stats = harness.scheduler.stats()
    assert (stats.running, stats.waiting, stats.paused) == (0, 0, 1)
    assert stats.pages_free + stats.pages_cached == stats.pages
    harness.run()
    heard = len(harness.tokens(key))
    assert harness.finished(key) is None
    harness.pause(key, paused=False)
    harness.pause(key, paused=False)
    assert harness.scheduler.stats().waiting == 1
    harness.run()
    assert heard < len(harness.tokens(key)) == 200
    # The prompt's full page was kept, so only its rest is run again.
    assert [c.start for p in harness.plans for c in p.prefills] == [0, 64]


def test_resumed_before_its_tokens_under_way_are_known_it_waits_for_them() -> None:
    harness, key = running(3)
    harness.pause(key)
    harness.pause(key, paused=False)
    assert harness.plan() is None
    while harness.steps_under_way:
        assert harness.state(key) is State.WAITING
        harness.collect()
    harness.take()
    plan = harness.plan()
    assert plan is not None
    assert plan.starts[0].output.tolist() == harness.tokens(key)
    harness.run()
    assert harness.finished(key) is FinishReason.LENGTH


def test_a_resumed_sequence_goes_before_those_of_its_priority_that_came_later() -> None:
    harness = Harness(SimulatedOptions(slots=1, pipeline_depth=1))
    busy = harness.submit(10, 8)
    early = harness.submit(10, 5)
    harness.turn()
    harness.pause(early)
    late = harness.submit(10, 5)
    harness.pause(early, paused=False)
    while harness.finished(busy) is None:
        harness.turn()
    harness.turn()
    assert harness.state(early) is State.DECODING
    assert harness.state(late) is State.WAITING
    harness.run()


@pytest.mark.parametrize("how", ["abort", "deadline", "cancel"])
def test_a_paused_sequence_can_still_end(how: str) -> None:
    harness, key = running(time_left_s=5.0)
    harness.pause(key)
    harness.run()
    match how:
        case "abort":
            assert harness.abort("it")
        case "cancel":
            harness.cancel(0, [key])
        case "deadline":
            assert harness.scheduler.next_deadline() is not None
            harness.clock.now += 5
    assert harness.plan() is None
    harness.take()
    expected = {"abort": FinishReason.ABORTED, "deadline": FinishReason.DEADLINE}.get(how)
    assert harness.finished(key) is expected
    harness.check_all_over()


def test_a_paused_sequence_whose_token_under_way_is_a_stop_token_ends() -> None:
    harness = Harness(SimulatedOptions(pipeline_depth=1, stop_one_in=1))
    key = harness.submit(10, 50, min_tokens=2, stop_token_ids=frozenset({5}))
    while len(harness.tokens(key)) < 2:
        harness.turn()
    harness.plan()
    harness.pause(key)
    harness.collect_all()
    assert harness.finished(key) is FinishReason.STOP_TOKEN
    assert harness.scheduler.stats().paused == 0
    harness.check_all_over()


def test_pausing_a_sequence_whose_last_token_is_under_way_changes_nothing() -> None:
    harness = Harness(SimulatedOptions(pipeline_depth=2))
    key = harness.submit(10, 1)
    harness.plan()
    assert harness.state(key) is State.ENDING
    harness.pause(key)
    harness.pause(key, paused=False)
    assert harness.plan() is None
    harness.pause(key)
    harness.collect_all()
    assert harness.finished(key) is FinishReason.LENGTH
    assert harness.scheduler.stats().paused == 0


# ---- faults


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_fault_ends_its_sequence_alone(depth: int) -> None:
    harness = Harness(
        SimulatedOptions(
            slots=3, pipeline_depth=depth, fault=lambda step, slot: "NaN" if (step, slot) == (7, 1) else None
        )
    )
    keys = [harness.submit(10, 30, seed=i) for i in range(3)]
    harness.run()
    assert [harness.finished(key) for key in keys] == [
        FinishReason.LENGTH,
        FinishReason.FAULT,
        FinishReason.LENGTH,
    ]
    assert harness.streams[0, keys[1]].fault == "NaN"
    assert len(harness.tokens(keys[1])) == 7
    harness.check_all_over()


def test_a_prompt_that_fails_in_its_first_of_many_chunks_ends() -> None:
    harness = Harness(SimulatedOptions(max_step_tokens=64, fault_token=999, pipeline_depth=3))
    key = harness.submit([999] + [1] * 500, 3)
    good = harness.submit([1] * 500, 3)
    harness.run()
    assert harness.finished(key) is FinishReason.FAULT
    assert "999" in harness.streams[0, key].fault
    assert harness.finished(good) is FinishReason.LENGTH


# ---- messages


def test_there_is_one_message_per_front_and_step_with_all_its_sequences() -> None:
    harness = Harness(SimulatedOptions(slots=8, pipeline_depth=1))
    keys = {front: [harness.submit(10, 5, front=front) for _ in range(4)] for front in (1, 2)}
    harness.plan()
    started = harness.take()
    assert {front: [s.key for s in message.started] for front, message in started.items()} == keys
    harness.collect()
    outputs = harness.take()
    assert {front: message.keys for front, message in outputs.items()} == keys
    assert all(message.counts == [1] * 4 for message in outputs.values())
    assert harness.take() == {}


def test_several_steps_not_taken_in_between_make_one_message_with_each_key_once() -> None:
    harness = Harness(SimulatedOptions(slots=4, pipeline_depth=3))
    keys = [harness.submit(10, 3, logprobs=1), harness.submit(10, 8)]
    for _ in range(3):
        harness.plan()
    for _ in range(3):
        harness.collect()
    (message,) = harness.take().values()
    assert message.keys == keys
    assert message.counts == [3, 3]
    assert len(message.logprobs[keys[0]]) == 3
    assert [finished.key for finished in message.finished] == [keys[0]]
    harness.run()


def test_logprobs_come_with_their_tokens_and_only_where_asked_for() -> None:
    harness = Harness(SimulatedOptions(slots=4, max_step_tokens=64))
    asking = harness.submit(150, 6, logprobs=3, prompt_logprobs=1)
    quiet = harness.submit(10, 6)
    harness.run()
    stream = harness.streams[0, asking]
    assert len(stream.logprobs) == 6
    assert all(len(entry.top_ids) == 3 for entry in stream.logprobs)
    assert len(stream.prompt_logprobs or ()) == 149
    assert not any(quiet in message.logprobs for outputs in harness.messages for message in outputs.values())


def test_a_prompt_of_one_token_has_prompt_logprobs_of_length_nought() -> None:
    harness = Harness()
    key = harness.submit([5], 2, prompt_logprobs=1)
    harness.run()
    assert harness.streams[0, key].prompt_logprobs == []


# ---- what the worker measures


class Recorder:
    def __init__(self) -> None:
        self.queue_s: list[float] = []
        self.n_first_tokens = 0

    def started(self, queue_s: float) -> None:
        self.queue_s.append(queue_s)

    def first_token(self) -> None:
        self.n_first_tokens += 1


def test_the_observer_hears_when_sequences_start_and_speak() -> None:
    recorder = Recorder()
    harness = Harness(SimulatedOptions(slots=1, pipeline_depth=1), observer=recorder)
    harness.submit(10, 3)
    harness.submit(10, 3)
    harness.submit(10, 3, request_id="unlucky")
    for _ in range(10):
        harness.plan()
        harness.clock.now += 1
        if harness._handles:
            harness.collect()
        harness.take()
        if len(recorder.queue_s) == 2:
            harness.abort("unlucky")
    assert recorder.queue_s == [0, 3]
    assert recorder.n_first_tokens == 2


def test_stats_count_what_happened() -> None:
    harness = Harness(SimulatedOptions(slots=2, pages=32))
    for _ in range(3):
        harness.submit(10, 4)
    harness.turn()
    stats = harness.scheduler.stats()
    assert (stats.running, stats.waiting, stats.slots, stats.pages) == (2, 1, 2, 32)
    harness.run()
    stats = harness.scheduler.stats()
    assert stats.generated_tokens == 12
    assert stats.prompt_tokens == stats.prefill_tokens == 30
    assert stats.finished == {FinishReason.LENGTH: 3}
    assert stats.steps == len(harness.plans)


def test_memory_of_deadlines_and_queue_does_not_grow_with_what_has_ended() -> None:
    capacity = EngineCapacity(1, 8, 500, 64, 1, True)
    scheduler = Scheduler(capacity, SchedulerOptions(), FakeClock())
    harness = Harness(SimulatedOptions(slots=1))
    harness.scheduler = scheduler
    harness.submit(10, 50)
    for _ in range(3000):
        key = harness.submit(5, 5, time_left_s=1e6)
        assert isinstance(key, int)
        scheduler.set_paused(0, key, True)
        scheduler.cancel(0, [key])
    assert len(scheduler._registry._deadlines._entries) < 200
    assert len(scheduler._planner.line._heap._entries) < 200
    assert len(scheduler._registry) == 1
