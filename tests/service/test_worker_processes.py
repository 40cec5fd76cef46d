"""Processes that are killed, stopped or hostile: the main process, fronts, and strangers on the socket."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import pytest

from engine.simulated import SimulatedOptions
from tests.service.worker_tools import (
    TIMEOUT_S,
    EngineSetup,
    Host,
    expected,
    read,
    request,
    running,
    until_connected,
    until_status,
)
from worker.client import WorkerPool, WorkerReport, spawn_process

ROOT = Path(__file__).parents[2]
SETUP = EngineSetup(
    SimulatedOptions(step_s=0.0005, max_sequence_length=100_000, pages=10_000, validate=False)
)
ENDLESS = 90_000


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


# ---- a main process of its own


MAIN_PROCESS = """
import asyncio, sys
from tests.service.test_worker_processes import host_until_killed
asyncio.run(host_until_killed(*sys.argv[1:]))
"""


async def host_until_killed(state: str, fifo: str, answer: str) -> None:
    """Brings a worker into a state, writes its pid and folder to a file descriptor, and stays."""
    setup = SETUP if state != "loading" else EngineSetup(hold_load=Path(fifo))
    host = Host(setup)
    host.supervisor.start()
    if state == "loading":
        await host.until(lambda reports: reports[0].load_stage == "reading weights")
    else:
        await host.until_ready()
        pool = host.add_pool()
        await until_connected(pool)
        if state == "busy":
            generation = await pool.submit(request("r", range(5), ENDLESS))
            await generation.next()
    (report,) = host.supervisor.reports()
    os.write(int(answer), f"{report.pid} {host.supervisor._folder}\n".encode())
    await asyncio.Event().wait()


@pytest.mark.parametrize("state", ["loading", "idle", "busy"])
def test_a_worker_ends_with_the_main_process(state: str, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reading, writing = os.pipe()
    command = [sys.executable, "-c", MAIN_PROCESS, state, str(fifo), str(writing)]
    quiet = subprocess.DEVNULL
    main = subprocess.Popen(command, cwd=ROOT, stdout=quiet, stderr=quiet, pass_fds=[writing])
    os.close(writing)
    with main, open(reading) as answer:
        worker_pid, folder = answer.readline().split(maxsplit=1)
        with ended(int(worker_pid)) as wait_for_end:
            assert Path(folder.strip()).stat().st_mode & 0o777 == 0o700
            main.kill()
            wait_for_end()
    assert not Path(folder.strip()).exists()


@contextmanager
def ended(pid: int) -> Iterator[Callable[[], None]]:
    """Yields a function that waits for the process, not our child, to end."""
    handle = os.pidfd_open(pid)
    try:

        def wait() -> None:
            readable, _, _ = select.select([handle], [], [], TIMEOUT_S)
            assert readable, f"process {pid} lives on"

        yield wait
    finally:
        os.close(handle)


# ---- fronts of their own


def run_front(authkey: bytes, reports: list[WorkerReport], length: int, pipe: Connection) -> None:
    asyncio.run(_stream(authkey, reports, length, pipe))


async def _stream(authkey: bytes, reports: list[WorkerReport], length: int, pipe: Connection) -> None:
    """Streams four answers, says when they have begun, and sends all tokens at the end."""
    pool = WorkerPool(1, authkey)
    pool.update(reports)
    await pool.wait_connected()
    generation = await pool.submit(request("front", range(9), length, n=4))
    update = await generation.next()
    assert update is not None
    pipe.send("begun")
    tokens: dict[int, list[int]] = {index: [] for index in range(4)}
    while update is not None:
        for part in update.answers:
            tokens[part.index] += part.tokens
        update = await generation.next()
    pipe.send(tokens)


async def start_front(host: Host, length: int) -> tuple[Any, Connection]:
    ours, theirs = Pipe()
    reports = host.supervisor.reports()
    process = spawn_process(run_front, (host.supervisor.authkey, reports, length, theirs), "front")
    theirs.close()
    assert await asyncio.to_thread(ours.recv) == "begun"
    return process, ours


def test_a_killed_fronts_sequences_are_freed() -> None:
    async def scenario() -> None:
        async with running(Host(SETUP)) as host:
            front, _ = await start_front(host, ENDLESS)
            await until_status(host.pools[0], lambda status: status.running == 4)
            front.kill()
            status = await until_status(host.pools[0], lambda status: status.running == 0)
            assert status.pages_free + status.pages_cached == status.pages
            front.join()

    run(scenario)


def test_a_stopped_front_slows_nobody_and_loses_nothing() -> None:
    async def scenario() -> None:
        async with running(Host(SETUP)) as host:
            length = 3000
            front, pipe = await start_front(host, length)
            assert front.pid is not None
            os.kill(front.pid, signal.SIGSTOP)
            try:
                mine = await host.pools[0].submit(request("mine", range(5), 1500))
                (answer,) = await read(mine)
                assert answer.tokens == expected(SETUP, range(5), 1500)
                # It has all that it asked for in its queue, or is halted; the worker holds nothing for it.
                await until_status(host.pools[0], lambda status: status.running == 0)
            finally:
                os.kill(front.pid, signal.SIGCONT)
            tokens = await asyncio.to_thread(pipe.recv)
            for index in range(4):
                assert tokens[index] == expected(SETUP, range(9), length, seed=index)
            await asyncio.to_thread(front.join)

    run(scenario)


def test_a_front_that_stands_still_too_long_is_cut_off_and_comes_back() -> None:
    async def scenario() -> None:
        setup = EngineSetup(SETUP.simulated, max_backlog=2000)
        async with running(Host(setup)) as host:
            length = 5000
            front, pipe = await start_front(host, length)
            assert front.pid is not None
            os.kill(front.pid, signal.SIGSTOP)
            try:
                status = await until_status(host.pools[0], lambda status: status.running == 0)
                assert status.steps < length, "it was never cut off"
                assert status.paused == 0
            finally:
                os.kill(front.pid, signal.SIGCONT)
            tokens = await asyncio.to_thread(pipe.recv)
            for index in range(4):
                assert tokens[index] == expected(setup, range(9), length, seed=index)
            await asyncio.to_thread(front.join)
            assert host.supervisor.reports()[0].restarts == 0

    run(scenario)


def test_an_interrupt_from_the_terminal_is_the_main_process_s_business() -> None:
    async def scenario() -> None:
        host = Host(SETUP)
        host.supervisor.start()
        host.kill(number=signal.SIGINT)  # while its interpreter starts
        await host.until_ready()
        try:
            pool = host.add_pool()
            await until_connected(pool)
            host.kill(number=signal.SIGINT)
            (answer,) = await read(await pool.submit(request("r", range(5), 100)))
            assert answer.tokens == expected(SETUP, range(5), 100)
            assert host.supervisor.reports()[0].restarts == 0
        finally:
            await pool.close()
            await host.supervisor.stop()

    run(scenario)


# ---- strangers


def test_strangers_on_the_socket_do_no_harm() -> None:
    async def scenario() -> None:
        async with running(Host(SETUP)) as host:
            address = host.supervisor.reports()[0].address
            assert address is not None
            with pytest.raises(AuthenticationError):
                await asyncio.to_thread(Client, address, "AF_UNIX", b"not the key")
            for garbage in (b"\0\0\0\x04abcd" * 100, b"\xff" * 10_000, b"GET / HTTP/1.1\r\n\r\n", b""):
                with socket.socket(socket.AF_UNIX) as stranger:
                    stranger.connect(address)
                    try:
                        stranger.sendall(garbage)
                    except OSError:
                        continue  # hung up on already
            silent = [socket.socket(socket.AF_UNIX) for _ in range(8)]
            for stranger in silent:
                stranger.connect(address)
            newcomer = host.add_pool()
            await until_connected(newcomer)
            (answer,) = await read(await newcomer.submit(request("r", range(5), 100)))
            assert answer.tokens == expected(SETUP, range(5), 100)
            for stranger in silent:
                stranger.close()
            assert host.supervisor.reports()[0].restarts == 0

    run(scenario)
