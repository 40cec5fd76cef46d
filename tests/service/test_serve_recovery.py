"""Processes killed outright while streams run: what clients notice, and what they do not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc

from protos.slipstream.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc
from protos.slipstream.v1.inference_pb2 import GenerateRequest, TokenIds
from protos.slipstream.v1.sampling_pb2 import SamplingParams
from tests.service.server_process import (
    COMMAND,
    DEADLINE_S,
    ROOT,
    ServerProcess,
    descendants,
    environment,
    is_alive,
    wait_until,
)

N_STREAMS = 16
N_TOKENS = 150


def request(stream: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=N_TOKENS, temperature=1, seed=stream, ignore_eos=True)
    return GenerateRequest(tokens=TokenIds(ids=[3 + stream, 4, 5, 6]), sampling=sampling)


def listeners(server: ServerProcess) -> set[int]:
    """The pids that listen on the server's port: its fronts."""
    port = f":{int(server.target.rpartition(':')[2]):04X}"
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1].endswith(port) and fields[3] == "0A":
                inodes.add(fields[9])
    found = set()
    for pid in descendants(server.process.pid):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
            except OSError:
                continue
            if match and match[1] in inodes:
                found.add(pid)
    return found


class Stream:
    """One Generate call on a connection of its own."""

    def __init__(self, server: ServerProcess, number: int, stack: ExitStack) -> None:
        channel = stack.enter_context(server.channel())
        status = control_pb2_grpc.ControlStub(channel).GetStatus(
            control_pb2.GetStatusRequest(), timeout=DEADLINE_S, wait_for_ready=True
        )
        self.front = status.front
        self.tokens: list[int] = []
        self.cached: list[int] = []
        self._call = inference_pb2_grpc.InferenceStub(channel).Generate(request(number), timeout=DEADLINE_S)

    def read_some(self) -> None:
        """Until the first tokens."""
        while not self.tokens:
            self._take(next(self._call))

    def read_all(self) -> grpc.StatusCode:
        try:
            for message in self._call:
                self._take(message)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    def _take(self, message: object) -> None:
        self.tokens.extend(message.token_ids)  # type: ignore[attr-defined]
        assert message.usage.completion_tokens == len(self.tokens)  # type: ignore[attr-defined]


def worker_pid(server: ServerProcess) -> int:
    (worker,) = server.status().workers
    return worker.pid


def test_streams_survive_the_death_of_their_worker(server: ServerProcess) -> None:
    with ExitStack() as stack:
        undisturbed = [Stream(server, i, stack) for i in range(N_STREAMS)]
        assert all(stream.read_all() is grpc.StatusCode.OK for stream in undisturbed)
    before = server.status().workers[0]
    with ExitStack() as stack:
        streams = [Stream(server, i, stack) for i in range(N_STREAMS)]
        for stream in streams:
            stream.read_some()
        os.kill(before.pid, signal.SIGKILL)
        assert all(stream.read_all() is grpc.StatusCode.OK for stream in streams)
    for stream, reference in zip(streams, undisturbed, strict=True):
        assert stream.tokens == reference.tokens
        assert len(stream.tokens) == N_TOKENS
    after = server.status().workers[0]
    assert after.pid != before.pid
    assert after.restarts == before.restarts + 1


def test_a_dead_front_is_replaced_and_the_other_goes_on(server: ServerProcess) -> None:
    wait_until(lambda: len(listeners(server)) == 2, "both fronts listen")
    with ExitStack() as stack:
        streams: list[Stream] = []
        while {stream.front for stream in streams} != {0, 1}:
            assert len(streams) < 64, "the kernel spreads connections over the fronts"
            streams.append(Stream(server, len(streams), stack))
        for stream in streams:
            stream.read_some()
        victim = min(listeners(server))
        os.kill(victim, signal.SIGKILL)
        codes = {stream: stream.read_all() for stream in streams}
    lost = {stream.front for stream, code in codes.items() if code is not grpc.StatusCode.OK}
    assert len(lost) == 1
    for stream, code in codes.items():
        if stream.front in lost:
            assert code is grpc.StatusCode.UNAVAILABLE
        else:
            assert code is grpc.StatusCode.OK
            assert len(stream.tokens) == N_TOKENS
    wait_until(lambda: len(listeners(server) - {victim}) == 2, "another front listens")
    with ExitStack() as stack:
        replaced: list[Stream] = []
        while not lost & {stream.front for stream in replaced}:
            assert len(replaced) < 64
            replaced.append(Stream(server, len(replaced), stack))
        wait_until(lambda: server.status().workers[0].state == 2, "the worker is ready")
        assert replaced[-1].read_all() in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)


def test_the_dead_front_left_no_work_behind(server: ServerProcess) -> None:
    def is_idle() -> bool:
        (worker,) = server.status().workers
        return worker.running == 0 and worker.waiting == 0

    wait_until(is_idle, "the worker has dropped what nobody waits for")


def test_a_dead_main_process_takes_all_with_it_though_nobody_reads_the_log(tiny_checkpoint: Path) -> None:
    """As when the pipe that the log went to is gone as well: writing to it then fails."""
    arguments = ["serve", "--model", str(tiny_checkpoint), "--engine", "simulated", "--fronts", "2"]
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--port", "0", "--metrics-port", "0"],
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    family = set()
    try:
        assert any(line.startswith("ready: ") for line in process.stdout)
        family = set(descendants(process.pid))
        assert len(family) >= 3
        process.stdout.close()
        process.kill()
        process.wait(DEADLINE_S)
        wait_until(lambda: not any(is_alive(pid) for pid in family), "every process has ended")
    finally:
        for pid in (process.pid, *family):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
