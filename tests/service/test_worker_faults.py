"""Workers die in every way; streams go on without a lost or repeated token, and only culprits fail."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.simulated import SimulatedOptions
from tests.service.worker_tools import (
    Answered,
    EngineSetup,
    Host,
    Misfortune,
    expected,
    read,
    request,
    running,
    until_connected,
    until_status,
)
from worker.client import (
    FinishReason,
    Generation,
    PoolOptions,
    Rejection,
    RejectReason,
    RestartPolicy,
    WorkerDeath,
    WorkerFailed,
    WorkerState,
)

STREAMS = 16
LENGTH = 1200
POISON = 31_999
SIMULATED = SimulatedOptions(slots=20, step_s=0.0005)
SETUP = EngineSetup(SIMULATED)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


class Streams:
    """Many streams of recognisable tokens, read as they come."""

    def __init__(self, host: Host, setup: EngineSetup) -> None:
        self._host = host
        self._setup = setup
        self._counts = [0] * STREAMS
        self._progress = asyncio.Condition()
        self._tasks: list[asyncio.Task[list[Answered]]] = []

    async def start(self) -> None:
        for number in range(STREAMS):
            pool = self._host.pools[number % len(self._host.pools)]
            prompt = range(number, 2 * number + 70)
            generation = await pool.submit(request(f"stream-{number}", prompt, LENGTH, seed=number))
            self._tasks.append(asyncio.create_task(self._read(number, generation)))

    async def until_each_has(self, more: int) -> None:
        """Waits for every stream to get so many tokens more than it has now."""
        goals = [min(count + more, LENGTH) for count in self._counts]
        async with self._progress:
            await self._progress.wait_for(
                lambda: all(count >= goal for count, goal in zip(self._counts, goals, strict=True))
            )

    async def check(self) -> None:
        """Waits for all ends; every stream must be as if nothing had happened."""
        for number, (answer,) in enumerate(await asyncio.gather(*self._tasks)):
            assert answer.reason is FinishReason.LENGTH, (number, answer.finished)
            prompt = range(number, 2 * number + 70)
            assert answer.tokens == expected(self._setup, prompt, LENGTH, seed=number)

    async def _read(self, number: int, generation: Generation) -> list[Answered]:
        loop_tasks = set()

        def note(answers: list[Answered]) -> None:
            self._counts[number] = len(answers[0].tokens)
            task = asyncio.get_running_loop().create_task(self._tell())
            loop_tasks.add(task)
            task.add_done_callback(loop_tasks.discard)

        try:
            return await read(generation, note)
        finally:
            generation.close()

    async def _tell(self) -> None:
        async with self._progress:
            self._progress.notify_all()


def test_sixteen_streams_survive_kill_after_kill() -> None:
    async def scenario() -> None:
        async with running(Host(SETUP), pools=2) as host:
            streams = Streams(host, SETUP)
            await streams.start()
            await streams.until_each_has(30)
            host.kill()
            await host.until_ready(restarts=1)
            await streams.until_each_has(1)
            host.kill()
            # And once more while the first of them are on trial.
            await host.until_ready(restarts=2)
            host.kill(number=signal.SIGTERM)
            await streams.check()
            assert host.supervisor.reports()[0].restarts == 3
            status = await until_status(host.pools[0], lambda status: status.running == 0)
            assert status.pages_free + status.pages_cached == status.pages

    run(scenario)


@pytest.mark.parametrize(("number", "deaths"), [(None, 2), (signal.SIGSEGV, 2), (signal.SIGKILL, 3)])
def test_a_request_that_kills_its_worker_fails_alone(number: int | None, deaths: int) -> None:
    async def scenario() -> None:
        setup = EngineSetup(SIMULATED, Misfortune(POISON, number))
        async with running(Host(setup), pools=2) as host:
            streams = Streams(host, setup)
            await streams.start()
            await streams.until_each_has(5)
            poison = await host.pools[1].submit(request("poison", [1, 2, POISON], 10, n=2))
            failed = asyncio.create_task(read(poison))
            await streams.check()
            for answer in await failed:
                assert answer.finished is not None
                assert answer.reason is FinishReason.FAULT
                assert "worker died" in answer.finished.message
                assert answer.tokens == []
            assert len(host.supervisor.reports()[0].deaths) == deaths

    run(scenario)


def test_streams_move_to_another_worker_at_once() -> None:
    async def scenario() -> None:
        host = Host(SETUP, workers=2, restarts=RestartPolicy(delay_s=3600, first_delay_s=3600))
        async with running(host) as host:
            streams = Streams(host, SETUP)
            await streams.start()
            await streams.until_each_has(5)
            host.kill(worker=1)
            await streams.check()
            assert [report.state for report in host.supervisor.reports()] == [
                WorkerState.READY,
                WorkerState.RESTARTING,
            ]

    run(scenario)


def test_every_answer_of_a_request_goes_on() -> None:
    async def scenario() -> None:
        async with running(Host(SETUP)) as host:
            started = asyncio.Event()

            def note(answers: list[Answered]) -> None:
                if all(len(answer.tokens) > 20 for answer in answers):
                    started.set()

            pool, prompt = host.pools[0], range(40)
            generation = await pool.submit(request("r", prompt, LENGTH, seed=7, n=4))
            reading = asyncio.create_task(read(generation, note))
            await started.wait()
            generation.finish(2)
            host.kill()
            answers = await reading
            for index in (0, 1, 3):
                assert answers[index].tokens == expected(SETUP, prompt, LENGTH, seed=7 + index)
            assert len(answers[2].tokens) < LENGTH
            assert not await pool.abort("r")

    run(scenario)


def test_a_broken_connection_is_no_death() -> None:
    async def scenario() -> None:
        async with running(Host(SETUP)) as host:
            streams = Streams(host, SETUP)
            await streams.start()
            await streams.until_each_has(5)
            (connection,) = host.pools[0]._roster.ready()
            connection._queue._socket.shutdown(socket.SHUT_RDWR)
            await streams.check()
            assert host.supervisor.reports()[0].restarts == 0

    run(scenario)


def test_what_a_dead_worker_had_sent_counts_even_if_its_death_is_heard_of_first() -> None:
    async def scenario() -> None:
        async with running(Host(SETUP)) as host:
            pool = host.pools[0]
            generation = await pool.submit(request("r", range(9), LENGTH))
            while not generation.answers[0].tokens:
                await generation.next()
            (connection,) = pool._roster.ready()
            # From here to update() the event loop reads nothing.
            handle = os.pidfd_open(host.supervisor.reports()[0].pid or 0)
            unread = connection._queue._socket
            select.select([unread], [], [], 30)
            while len(unread.recv(2000, socket.MSG_PEEK)) < 2000:
                pass  # a few steps' messages, one every half millisecond
            host.kill()
            select.select([handle], [], [], 30)
            os.close(handle)
            had = len(generation.answers[0].tokens)
            (report,) = host.supervisor.reports()
            death = WorkerDeath(report.generation, -signal.SIGKILL)
            pool.update(
                [
                    replace(
                        report,
                        state=WorkerState.RESTARTING,
                        generation=report.generation + 1,
                        address=None,
                        deaths=(death,),
                    )
                ]
            )
            assert len(generation.answers[0].tokens) > had
            (answer,) = await read(generation)
            assert had + len(answer.tokens) >= LENGTH
            assert generation.answers[0].tokens.tolist() == expected(SETUP, range(9), LENGTH)

    run(scenario)


def test_a_halted_stream_outlives_its_worker() -> None:
    async def scenario() -> None:
        async with running(Host(SETUP), pool_options=PoolOptions(pause_at=64)) as host:
            pool = host.pools[0]
            generation = await pool.submit(request("r", range(9), LENGTH))
            await until_status(pool, lambda status: status.paused == 1)
            host.kill()
            await host.until_ready(restarts=1)
            await until_connected(pool)
            (answer,) = await read(generation)
            assert answer.tokens == expected(SETUP, range(9), LENGTH)

    run(scenario)


def test_a_worker_that_hangs_is_replaced() -> None:
    async def scenario() -> None:
        setup = EngineSetup(SIMULATED, Misfortune(POISON, hangs=True))
        async with running(Host(setup, hang_timeout_s=1.0)) as host:
            hung = await host.pools[0].submit(request("poison", [POISON], 10))
            (answer,) = await read(hung)
            assert answer.reason is FinishReason.FAULT
            await host.until_ready(restarts=2)
            await until_connected(host.pools[0])
            (answer,) = await read(await host.pools[0].submit(request("r", range(5), 10)))
            assert answer.tokens == expected(setup, range(5), 10)

    run(scenario)


def test_without_a_worker_requests_are_refused_and_orphans_wait_their_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        fifo = tmp_path / "hold"
        os.mkfifo(fifo)
        setup = EngineSetup(SIMULATED, hold_load=fifo)
        host = Host(setup)
        host.supervisor.start()
        pool = host.add_pool(PoolOptions(orphan_wait_s=0.2))
        try:
            await host.until(lambda reports: reports[0].load_stage == "reading weights")
            assert host.supervisor.reports()[0].load_progress == 0.5
            with pytest.raises(Rejection) as caught:
                await pool.submit(request("r", range(5), 10))
            assert caught.value.reason is RejectReason.NO_WORKER
            assert caught.value.message == "the model is loading"
            await asyncio.to_thread(fifo.write_bytes, b"")
            await until_connected(pool)
            waits = await pool.submit(request("waits", range(5), LENGTH))
            expires = await pool.submit(request("expires", range(5), LENGTH, time_left_s=0.1))
            aborted = await pool.submit(request("aborted", range(5), LENGTH))
            host.kill()
            await host.until(lambda reports: reports[0].state is WorkerState.RESTARTING)
            assert await pool.abort("aborted")
            reasons = [(await read(each))[0].reason for each in (waits, expires, aborted)]
            assert reasons == [FinishReason.FAULT, FinishReason.DEADLINE, FinishReason.ABORTED]
        finally:
            await pool.close()
            await host.supervisor.stop()

    run(scenario)


def test_a_model_that_cannot_be_loaded_is_reported_with_its_message() -> None:
    async def scenario() -> None:
        host = Host(EngineSetup(load_error="config.json of the model lacks hidden_size"))
        host.supervisor.start()
        try:
            with pytest.raises(WorkerFailed, match=r"^config.json of the model lacks hidden_size$"):
                await host.supervisor.wait_ready()
            assert await host.supervisor.wait_failed() == "config.json of the model lacks hidden_size"
            (report,) = await host.until(lambda reports: reports[0].state is WorkerState.FAILED)
            assert report.restarts == 0
        finally:
            await host.supervisor.stop()

    run(scenario)


def test_a_worker_that_never_serves_is_given_up() -> None:
    async def scenario() -> None:
        host = Host(
            EngineSetup(SIMULATED, Misfortune(POISON)), restarts=RestartPolicy(delay_s=0.01, max_deaths=3)
        )
        async with running(host) as host:
            pool = host.pools[0]
            for number in range(3):
                await host.until_ready(restarts=number)
                await until_connected(pool)
                host.kill()
                await host.until(lambda reports, number=number: len(reports[0].deaths) > number)
            (report,) = host.supervisor.reports()
            assert report.state is WorkerState.FAILED
            assert report.last_error == "killed by signal 9"
            assert (await host.supervisor.wait_failed()).endswith("the last death: killed by signal 9")
            with pytest.raises(Rejection, match="have failed"):
                await pool.submit(request("r", range(5), 10))

    run(scenario)


def test_stop_ends_workers_that_load_and_workers_that_do_not_listen(tmp_path: Path) -> None:
    async def scenario() -> None:
        fifo = tmp_path / "hold"
        os.mkfifo(fifo)
        loading = Host(EngineSetup(SIMULATED, hold_load=fifo))
        loading.supervisor.start()
        await loading.until(lambda reports: reports[0].load_stage == "reading weights")
        await loading.supervisor.stop(grace_s=20)
        async with running(Host(SETUP)) as deaf:
            deaf.kill(number=signal.SIGSTOP)
            await deaf.supervisor.stop(grace_s=0.1)
            assert deaf.supervisor.reports()[0].pid is None

    run(scenario)
