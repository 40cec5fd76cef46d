"""A real `slipstream serve` for tests: started as a user would, watched by its own output, always ended."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc

from protos.slipstream.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "service.cli"]
DEADLINE_S = 60.0


def environment() -> dict[str, str]:
    """That of this process, without options for the server."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLIPSTREAM_")}
    return kept | {"OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run_cli(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """A command, run to its end."""
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=ROOT,
        env=environment(),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def assert_one_error_line(returncode: int, stderr: str, part: str) -> None:
    """The command failed and said so in one clear line."""
    assert returncode == 1, stderr
    assert "Traceback" not in stderr
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, stderr
    assert part in errors[0]
    assert "[error " not in stderr, "the same told again as a log event"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """One server. Use as a context manager: whatever happens, no process of it is left."""

    def __init__(self, model: Path, *flags: str, metrics_port: int = 0) -> None:
        self.model = model
        self.metrics_port = metrics_port
        self.target = ""
        self._flags = flags
        self._lines: queue.Queue[str | None] = queue.Queue()

    def __enter__(self) -> ServerProcess:
        arguments = ["serve", "--model", str(self.model), "--port", "0"]
        arguments += ["--metrics-port", str(self.metrics_port), *self._flags]
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.stderr_lines: list[str] = []
        for stream, take in (
            (self.process.stdout, self._lines.put),
            (self.process.stderr, self.stderr_lines.append),
        ):
            threading.Thread(target=_pump, args=(stream, take), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        family = [self.process.pid, *descendants(self.process.pid)]
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)

    def wait_for_line(self, prefix: str) -> str:
        """The rest of the first line of standard output that begins so."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            line = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            assert line is not None, f"the server ended: {self.stderr}"
            if line.startswith(prefix):
                return line.removeprefix(prefix).strip()

    def wait_ready(self) -> None:
        self.target = self.wait_for_line("listening on ")
        self.wait_for_line("ready: ")

    @property
    def stderr(self) -> str:
        return "".join(self.stderr_lines)

    def send(self, number: signal.Signals) -> None:
        """To the main process alone."""
        self.process.send_signal(number)

    def send_to_group(self, number: signal.Signals) -> None:
        """To every process, as a terminal's Ctrl-C or a service manager does it."""
        os.killpg(self.process.pid, number)

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(DEADLINE_S)

    @contextlib.contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        """A connection of its own, so that the kernel picks a front for it."""
        with grpc.insecure_channel(self.target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            yield channel

    def status(self) -> control_pb2.GetStatusResponse:
        with self.channel() as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            return stub.GetStatus(control_pb2.GetStatusRequest(), timeout=DEADLINE_S, wait_for_ready=True)


def http_status(server: ServerProcess, path: str) -> int:
    """The status code of a GET on the server's HTTP port."""
    try:
        url = f"http://127.0.0.1:{server.metrics_port}{path}"
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@contextlib.contextmanager
def inference(server: ServerProcess) -> Iterator[inference_pb2_grpc.InferenceStub]:
    with server.channel() as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


@contextlib.contextmanager
def running_server(model: Path, *flags: str, metrics_port: int = 0) -> Iterator[ServerProcess]:
    """A server that takes requests."""
    with ServerProcess(model, *flags, metrics_port=metrics_port) as server:
        server.wait_ready()
        yield server


def descendants(pid: int) -> list[int]:
    """All living processes below `pid`."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if fields[0] != "Z":
                    parents[int(entry.name)] = int(fields[1])
    found = [pid]
    for candidate in found:
        found.extend(child for child, parent in parents.items() if parent == candidate)
    return found[1:]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: object, what: str) -> None:
    """Polls a condition that nothing announces, such as another process's end."""
    assert callable(condition)
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)


def _pump(stream: object, take: object) -> None:
    assert callable(take)
    for line in stream:  # type: ignore[attr-defined]
        take(line)
    if getattr(take, "__name__", "") == "put":
        take(None)
