"""Streams through real worker processes: exact tokens, ends of every kind, limits, status, profile, drain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from engine.simulated import SimulatedOptions
from tests.service.worker_tools import (
    Answered,
    EngineSetup,
    Host,
    expected,
    read,
    request,
    running,
    until_status,
)
from worker.client import (
    FinishReason,
    Generation,
    PoolOptions,
    Rejection,
    RejectReason,
    Sampling,
    SchedulerOptions,
    merge_metrics,
)

ENDLESS = 3900
SLOW = EngineSetup(SimulatedOptions(step_s=0.002))
"""A stream of ENDLESS tokens takes eight seconds: long enough to end it in other ways."""


async def first_token(generation: Generation) -> None:
    while (update := await generation.next()) is not None:
        if any(part.tokens for part in update.answers):
            return
    raise AssertionError("the stream ended without a token")


async def rejection(generation: Generation) -> Rejection:
    with pytest.raises(Rejection) as caught:
        await generation.next()
    generation.close()
    return caught.value


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def test_streams_of_several_fronts_and_workers_are_exact() -> None:
    async def scenario() -> None:
        setup = EngineSetup(SimulatedOptions(slots=8, pages=64))
        async with running(Host(setup, workers=2), pools=2) as host:

            async def stream(number: int) -> list[Answered]:
                prompt = range(number, number + 3 + 29 * number)
                pool = host.pools[number % 2]
                generation = await pool.submit(request(f"r{number}", prompt, 1 + 7 * number, seed=number))
                return await read(generation)

            for number, answers in enumerate(await asyncio.gather(*map(stream, range(24)))):
                prompt = range(number, number + 3 + 29 * number)
                assert answers[0].tokens == expected(setup, prompt, 1 + 7 * number, seed=number)
                assert answers[0].reason is FinishReason.LENGTH
            used = [view.status.steps for view in await host.pools[0].statuses() if view.status]
            assert len(used) == 2
            assert all(used), "placement left a worker idle"

    run(scenario)


def test_each_answer_has_its_own_seed_and_repeated_prompts_are_cached() -> None:
    async def scenario() -> None:
        setup, prompt = EngineSetup(), range(200)
        async with running(Host(setup)) as host:
            generation = await host.pools[0].submit(request("three", prompt, 20, seed=2**64 - 1, n=3))
            answers = await read(generation)
            for answer, seed in zip(answers, (2**64 - 1, 0, 1), strict=True):
                assert answer.tokens == expected(setup, prompt, 20, seed=seed)
            again = await read(await host.pools[0].submit(request("again", prompt, 1)))
            assert again[0].cached_tokens == 192

    run(scenario)


def test_log_probabilities_come_with_their_tokens_and_the_prompts_once() -> None:
    async def scenario() -> None:
        async with running(Host()) as host:
            sampling = Sampling(logprobs=2, prompt_logprobs=1)
            wanted = request("r", range(150), 30)
            generation = await host.pools[0].submit(
                type(wanted)("r", wanted.prompt, sampling, wanted.max_tokens)
            )
            of_prompt, of_tokens, tokens = [], [], []
            while (update := await generation.next()) is not None:
                if update.prompt_logprobs is not None:
                    of_prompt.append(update.prompt_logprobs)
                for part in update.answers:
                    assert len(part.logprobs) == len(part.tokens)
                    of_tokens += part.logprobs
                    tokens += part.tokens
            assert [len(whole) for whole in of_prompt] == [149]
            assert len(of_tokens) == len(tokens) == 30
            assert all(len(logprobs.top_ids) == 2 for logprobs in of_tokens)

    run(scenario)


def test_a_closed_request_frees_its_sequences() -> None:
    async def scenario() -> None:
        async with running(Host(SLOW)) as host:
            pool = host.pools[0]
            generation = await pool.submit(request("r", range(100), ENDLESS, n=3))
            await first_token(generation)
            generation.finish(1)
            generation.finish(1)
            await until_status(pool, lambda status: status.running == 2)
            generation.close()
            generation.close()
            assert await generation.next() is None
            status = await until_status(pool, lambda status: status.running == 0)
            assert status.pages_free + status.pages_cached == status.pages
            (await pool.submit(request("r", range(100), 1))).close()  # the id is free again

    run(scenario)


def test_an_id_in_flight_is_refused_on_any_front() -> None:
    async def scenario() -> None:
        async with running(Host(SLOW), pools=2) as host:
            first, second = host.pools
            generation = await first.submit(request("same", range(5), ENDLESS))
            await first_token(generation)
            with pytest.raises(Rejection) as caught:
                await first.submit(request("same", range(5), 1))
            assert caught.value.reason is RejectReason.DUPLICATE_ID
            refused = await second.submit(request("same", range(5), 1))
            assert (await rejection(refused)).reason is RejectReason.DUPLICATE_ID
            generation.close()
            assert len((await read(await first.submit(request("same", range(5), 1))))[0].tokens) == 1

    run(scenario)


def test_abort_ends_a_request_of_any_front_even_before_it_comes() -> None:
    async def scenario() -> None:
        async with running(Host(SLOW, workers=2), pools=2) as host:
            first, second = host.pools
            generation = await first.submit(request("r", range(5), ENDLESS, n=2))
            await first_token(generation)
            assert await second.abort("r")
            assert [answer.reason for answer in await read(generation)] == [FinishReason.ABORTED] * 2
            generation.close()
            assert not await second.abort("later")
            assert not await second.abort("later")
            refused = await first.submit(request("later", range(5), 1))
            assert (await rejection(refused)).reason is RejectReason.ABORTED_BEFORE

    run(scenario)


def test_a_deadline_ends_a_stream_with_what_it_has() -> None:
    async def scenario() -> None:
        async with running(Host(SLOW)) as host:
            generation = await host.pools[0].submit(request("r", range(5), ENDLESS, time_left_s=0.3))
            (answer,) = await read(generation)
            assert answer.reason is FinishReason.DEADLINE
            assert answer.tokens == expected(SLOW, range(5), len(answer.tokens))
            await until_status(host.pools[0], lambda status: status.running == 0)

    run(scenario)


def test_a_full_queue_refuses_and_says_when_it_has_room() -> None:
    async def scenario() -> None:
        setup = EngineSetup(SimulatedOptions(slots=2, step_s=0.002))
        changes = asyncio.Event()
        async with running(Host(setup, scheduler=SchedulerOptions(max_queued=1))) as host:
            pool = host.pools[0]
            pool._on_change = changes.set
            running_ones = [await pool.submit(request(f"r{i}", range(5), ENDLESS)) for i in range(3)]
            for generation in running_ones[:2]:
                await first_token(generation)
            refused = await rejection(await pool.submit(request("one too many", range(5), 1)))
            assert refused.reason is RejectReason.QUEUE_FULL
            assert refused.retry_after_s is not None
            while pool.has_room:
                changes.clear()
                await changes.wait()
            running_ones[0].close()
            while not pool.has_room:
                changes.clear()
                await changes.wait()
            for generation in running_ones:
                generation.close()
            assert len((await read(await pool.submit(request("now", range(5), 3))))[0].tokens) == 3

    run(scenario)


def test_a_request_that_one_worker_has_no_room_for_goes_to_another() -> None:
    async def scenario() -> None:
        setup = EngineSetup(SimulatedOptions(slots=1, step_s=0.002))
        async with running(Host(setup, workers=2, scheduler=SchedulerOptions(max_queued=0)), pools=2) as host:
            first, second = host.pools
            generation = await first.submit(request("a", range(5), ENDLESS))
            await first_token(generation)
            # The second front knows nothing of the first one's load yet, so it may try the full worker first.
            others = [await second.submit(request(f"b{i}", range(5), 3)) for i in range(1)]
            assert [len((await read(other))[0].tokens) for other in others] == [3]
            assert not generation.answers[0].is_over

    run(scenario)


def test_a_reader_that_stands_still_is_halted_within_its_bound() -> None:
    async def scenario() -> None:
        setup = EngineSetup(SimulatedOptions(max_sequence_length=8_000, slots=4))
        bound = 256
        async with running(Host(setup), pool_options=PoolOptions(pause_at=bound)) as host:
            pool = host.pools[0]
            still = await pool.submit(request("still", range(5), 6_000))
            status = await until_status(pool, lambda status: status.paused == 1)
            assert status.running == 0
            assert status.pages_free + status.pages_cached == status.pages
            (other,) = await read(await pool.submit(request("other", range(7), 5000)))
            assert other.tokens == expected(setup, range(7), 5000)
            gathered = still.answers[0].unread
            assert bound <= gathered
            assert (await until_status(pool, lambda status: status.paused == 1)).running == 0
            assert still.answers[0].unread == gathered, "a halted stream went on"
            (answer,) = await read(still)
            assert answer.tokens == expected(setup, range(5), 6_000)

    run(scenario)


def test_status_and_metrics_count_what_happened() -> None:
    async def scenario() -> None:
        async with running(Host(EngineSetup(SimulatedOptions(slots=8, pages=77)), workers=2)) as host:
            pool = host.pools[0]
            await asyncio.gather(
                *[read(await pool.submit(request(f"r{i}", range(i, i + 70), 50))) for i in range(10)]
            )
            views = await pool.statuses()
            assert [view.report.index for view in views] == [0, 1]
            statuses = [view.status for view in views if view.status is not None]
            assert [status.pages for status in statuses] == [77, 77]
            plain = [
                [
                    type(metric)(metric.name, metric.kind, metric.help, (), metric.value, metric.histogram)
                    for metric in status.metrics
                ]
                for status in statuses
            ]
            totals = {metric.name: metric for metric in merge_metrics(plain)}
            assert totals["slipstream:prompt_tokens"].value == 700
            assert totals["slipstream:generation_tokens"].value == 500
            assert totals["slipstream:num_requests_running"].value == 0
            queued = totals["slipstream:request_queue_time_seconds"].histogram
            between = totals["slipstream:inter_token_latency_seconds"].histogram
            assert queued is not None
            assert sum(queued.counts) == 10
            assert between is not None
            assert sum(between.counts) == 10 * 49

    run(scenario)


def test_profile_times_the_stages_of_so_many_steps_or_of_what_there_was() -> None:
    async def scenario() -> None:
        async with running(Host(SLOW)) as host:
            pool = host.pools[0]
            generation = await pool.submit(request("r", range(5), ENDLESS))
            await first_token(generation)
            done = await pool.profile(0, steps=20, timeout_s=20)
            stages = {stage.stage: stage for stage in done.stages}
            assert done.steps == 20
            assert set(stages) >= {"receive", "schedule", "execute", "collect", "send"}
            # 2 ms a step, spent waiting for the engine.
            assert stages["collect"].total >= 0.5 * 20 * 2000
            for stage in done.stages:
                assert 0 <= stage.median <= stage.p99 <= stage.total
            generation.close()
            await until_status(pool, lambda status: status.running == 0)
            assert (await pool.profile(0, steps=20, timeout_s=0.05)).steps == 0
            with pytest.raises(Rejection):
                await pool.profile(5, steps=1, timeout_s=1)

    run(scenario)


def test_a_draining_server_refuses_newcomers_and_finishes_the_rest() -> None:
    async def scenario() -> None:
        setup = EngineSetup(SimulatedOptions(step_s=0.001))
        async with running(Host(setup)) as host:
            pool = host.pools[0]
            generation = await pool.submit(request("r", range(5), 300))
            await first_token(generation)
            host.supervisor.drain()
            with pytest.raises(Rejection) as caught:
                await pool.submit(request("late", range(5), 1))
            assert caught.value.reason is RejectReason.DRAINING
            assert len((await read(generation))[0].tokens) + 1 >= 299
            await until_status(pool, lambda status: status.is_draining)

    run(scenario)


def test_a_stopping_worker_tells_its_streams() -> None:
    async def scenario() -> None:
        async with running(Host(SLOW)) as host:
            generation = await host.pools[0].submit(request("r", range(5), ENDLESS))
            await first_token(generation)
            await host.supervisor.stop()
            (answer,) = await read(generation)
            assert answer.finished is not None
            assert answer.finished.message == "the server is stopping"

    run(scenario)
