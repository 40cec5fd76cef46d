"""Who is taken, who is refused, and what the refused are told."""

from __future__ import annotations

import pytest
from scheduler_harness import Harness

from engine.simulated import SimulatedOptions
from worker.messages import FinishReason, Rejected, RejectReason


def refusal(answer: int | Rejected) -> Rejected:
    assert isinstance(answer, Rejected)
    return answer


def test_a_sequence_longer_than_the_longest_is_too_long() -> None:
    harness = Harness(SimulatedOptions(max_sequence_length=100))
    rejected = refusal(harness.submit(60, 41))
    assert rejected.reason is RejectReason.TOO_LONG
    assert "60 prompt tokens and max_tokens 41 make 101 tokens" in rejected.message
    assert "100" in rejected.message
    key = harness.submit(60, 40)
    harness.run()
    assert harness.finished(key) is FinishReason.LENGTH


def test_a_sequence_is_too_long_exactly_if_it_could_not_finish_alone() -> None:
    harness = Harness(SimulatedOptions(pages=2))
    # The last token is never run: 129 tokens need KV for 128 positions, which are two pages.
    assert refusal(harness.submit(100, 30)).reason is RejectReason.TOO_LONG
    key = harness.submit(100, 29)
    harness.run()
    assert len(harness.tokens(key)) == 29
    assert harness.streams[0, key].preemptions == 0


def test_an_id_in_flight_is_refused_from_any_front_until_all_its_answers_are_over() -> None:
    harness = Harness()
    key = harness.submit(10, 3, request_id="same", n=2)
    for front in (0, 1):
        rejected = refusal(harness.submit(10, 3, request_id="same", front=front))
        assert rejected.reason is RejectReason.DUPLICATE_ID
        assert '"same"' in rejected.message
    harness.cancel(0, [key])
    assert refusal(harness.submit(10, 3, request_id="same")).reason is RejectReason.DUPLICATE_ID
    harness.run()
    again = harness.submit(10, 3, request_id="same", front=1)
    harness.run()
    assert harness.finished(again, front=1) is FinishReason.LENGTH


def test_a_key_in_use_is_refused_without_harm_to_its_owner() -> None:
    harness = Harness()
    key = harness.submit(10, 3, n=2)
    harness._next_key = key + 1
    assert refusal(harness.submit(10, 3, request_id="other")).reason is RejectReason.DUPLICATE_ID
    harness.run()
    assert harness.finished(key + 1) is FinishReason.LENGTH


def test_an_abort_that_comes_first_refuses_the_request_for_a_while() -> None:
    harness = Harness()
    assert not harness.abort("early")
    harness.clock.now += 59.9
    assert refusal(harness.submit(request_id="early")).reason is RejectReason.ABORTED_BEFORE
    assert isinstance(harness.submit(request_id="other"), int)
    harness.clock.now += 0.1
    assert isinstance(harness.submit(request_id="early"), int)


def test_a_second_early_abort_counts_from_then() -> None:
    harness = Harness(abort_memory_s=10)
    harness.abort("early")
    harness.clock.now += 9
    harness.abort("early")
    harness.clock.now += 9
    assert refusal(harness.submit(request_id="early")).reason is RejectReason.ABORTED_BEFORE


def test_an_early_abort_that_is_repeated_does_not_prolong_others() -> None:
    harness = Harness(abort_memory_s=10)
    harness.abort("repeated")
    harness.abort("once")
    harness.clock.now += 9
    harness.abort("repeated")
    harness.clock.now += 2
    assert isinstance(harness.submit(request_id="once"), int)
    assert refusal(harness.submit(request_id="repeated")).reason is RejectReason.ABORTED_BEFORE


def test_early_aborts_are_remembered_up_to_a_number() -> None:
    harness = Harness(abort_memory_size=3)
    for name in "abcd":
        harness.abort(name)
    assert isinstance(harness.submit(request_id="a"), int)
    for name in "bcd":
        assert refusal(harness.submit(request_id=name)).reason is RejectReason.ABORTED_BEFORE
    assert len(harness.scheduler._registry.aborts) == 3


def test_the_queue_holds_so_many_sequences_beyond_the_free_slots() -> None:
    harness = Harness(SimulatedOptions(slots=2), max_queued=3)
    for _ in range(5):
        assert isinstance(harness.submit(10, 50), int)
    assert refusal(harness.submit()).reason is RejectReason.QUEUE_FULL
    harness.turn()
    assert harness.scheduler.stats().waiting == 3
    rejected = refusal(harness.submit())
    assert rejected.reason is RejectReason.QUEUE_FULL
    assert rejected.retry_after_s is not None
    assert 0 < rejected.retry_after_s <= 60
    assert harness.scheduler.stats().rejected == {RejectReason.QUEUE_FULL: 2}


def test_every_answer_of_a_request_counts_as_one_in_the_queue() -> None:
    harness = Harness(SimulatedOptions(slots=1), max_queued=4)
    harness.submit(10, 50)
    harness.turn()
    assert isinstance(harness.submit(10, 50, n=3), int)
    assert refusal(harness.submit(10, 50, n=2)).reason is RejectReason.QUEUE_FULL
    assert isinstance(harness.submit(10, 50, n=1), int)


def test_paused_sequences_do_not_fill_the_queue() -> None:
    harness = Harness(SimulatedOptions(slots=1), max_queued=1)
    harness.submit(10, 50)
    harness.turn()
    key = harness.submit(10, 50)
    assert refusal(harness.submit()).reason is RejectReason.QUEUE_FULL
    harness.pause(key)
    assert isinstance(harness.submit(), int)


def test_an_idle_worker_takes_a_request_with_more_answers_than_the_queue_has_places() -> None:
    harness = Harness(SimulatedOptions(slots=2), max_queued=0)
    key = harness.submit(10, 3, n=5)
    harness.run()
    assert all(harness.finished(key + answer) is FinishReason.LENGTH for answer in range(5))


def test_the_advised_wait_follows_how_long_sequences_last() -> None:
    waits = []
    for step_s in (0.01, 1.0):
        harness = Harness(SimulatedOptions(slots=1), max_queued=0)
        for _ in range(40):
            harness.submit(10, 5)
            while harness.turn():
                harness.clock.now += step_s
        harness.submit(10, 5)
        harness.turn()
        waits.append(refusal(harness.submit(10, 5)).retry_after_s)
    assert waits[0] < 0.5 < 2 < waits[1]


def test_a_resubmission_is_taken_whatever_the_queue_and_goes_on_where_it_was() -> None:
    harness = Harness(SimulatedOptions(slots=1), max_queued=0)
    busy = harness.submit(10, 50)
    harness.turn()
    whole = Harness()
    prompt = list(range(70))
    reference = whole.submit(prompt, 20, seed=5)
    whole.run()
    sent = whole.tokens(reference)[:8]
    key = harness.submit(prompt, 20, seed=5, output=sent, is_resubmission=True)
    harness.run()
    assert harness.tokens(key) == whole.tokens(reference)
    assert harness.finished(key) is harness.finished(busy) is FinishReason.LENGTH
    assert harness.scheduler.stats().generated_tokens == 50 + 12
    assert sum(len(plan.decodes) for plan in harness.plans) == 49 + 11


def test_a_resubmission_with_output_has_delivered_its_prompt_logprobs() -> None:
    harness = Harness()
    first = harness.submit([4, 5, 6], 5, prompt_logprobs=1)
    harness.run()
    sent = harness.tokens(first)[:2]
    again = harness.submit([4, 5, 6], 5, prompt_logprobs=1, output=sent, is_resubmission=True)
    fresh = harness.submit([4, 5, 6], 5, prompt_logprobs=1, is_resubmission=True)
    harness.run()
    assert harness.streams[0, again].prompt_logprobs is None
    assert harness.streams[0, fresh].prompt_logprobs is not None


def test_a_resubmission_goes_before_new_requests_of_its_priority() -> None:
    harness = Harness(SimulatedOptions(slots=1, pipeline_depth=1))
    new = harness.submit(10, 3)
    urgent = harness.submit(10, 3, priority=1)
    resubmitted = harness.submit(10, 3, is_resubmission=True)
    order = []
    while harness.turn():
        for message in harness.messages.pop().values():
            order += [finished.key for finished in message.finished]
    assert order == [urgent, resubmitted, new]


@pytest.mark.parametrize(
    ("stops", "max_tokens", "reason"),
    [(frozenset(), 3, FinishReason.LENGTH), (frozenset({9}), 8, FinishReason.STOP_TOKEN)],
)
def test_a_resubmission_that_lacks_nothing_just_ends(
    stops: frozenset[int], max_tokens: int, reason: FinishReason
) -> None:
    harness = Harness()
    answer = harness.submit([1, 2], max_tokens, stop_token_ids=stops, output=[5, 7, 9], is_resubmission=True)
    assert isinstance(answer, int)
    assert harness.scheduler.plan() is None
    (message,) = harness.scheduler.take_outputs().values()
    assert [(finished.key, finished.reason) for finished in message.finished] == [(answer, reason)]
    assert message.tokens == []
    assert harness.is_idle


def test_a_draining_scheduler_refuses_new_requests_but_finishes_what_it_has() -> None:
    harness = Harness()
    key = harness.submit(10, 5)
    harness.scheduler.begin_drain()
    rejected = refusal(harness.submit())
    assert rejected.reason is RejectReason.DRAINING
    assert harness.scheduler.stats().is_draining
    resubmitted = harness.submit(10, 5, is_resubmission=True)
    harness.run()
    assert harness.finished(key) is harness.finished(resubmitted) is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": []}, "empty prompt"),
        ({"max_tokens": 0}, "max_tokens 0 and n 1"),
        ({"n": 0}, "n 0"),
        ({"n": 2, "output": [1]}, "goes with n = 1 only"),
    ],
)
def test_a_malformed_message_raises_and_leaves_no_trace(fields: dict[str, object], text: str) -> None:
    harness = Harness()
    with pytest.raises(ValueError, match=text):
        harness.submit(**fields)  # type: ignore[arg-type]
    assert harness.is_idle


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_queued": -1}, "max_queued"),
        ({"prefill_tokens_beside_decodes": 0}, "prefill_tokens_beside_decodes"),
        ({"prefill_policy": "sometimes"}, "prefill_policy"),
        ({"abort_memory_s": -1}, "abort_memory_s"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Harness(**options)


def test_a_step_must_hold_a_token_of_each_slot() -> None:
    with pytest.raises(ValueError, match="max_step_tokens is 15, but 16 slots"):
        Harness(SimulatedOptions(slots=16, max_step_tokens=15))
    Harness(SimulatedOptions(slots=16, max_step_tokens=16))
