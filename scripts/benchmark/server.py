"""A server of its own for a measurement, and a load on it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from scripts.benchmark.machine import ROOT
from service.cli.connection import Connection
from service.cli.load import Load, Summary, run_load

STOP_TIMEOUT_S = 30


@contextmanager
def serving(model: str, *flags: str) -> Iterator[Connection]:
    """`slipstream serve` on a free port, from ready to drained. Raises RuntimeError if it does not start."""
    command = [sys.executable, "-m", "service.cli", "serve", "--model", model, "--port", "0"]
    command += ["--metrics-port", "0", "--log-level", "warning", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            target = ""
            for line in process.stdout:
                if line.startswith("listening on "):
                    target = line.removeprefix("listening on ").strip()
                if line.startswith("ready: "):
                    break
            else:
                raise RuntimeError("the server ended before it was ready; its message stands above")
            yield Connection(target=target)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def measure(connection: Connection, load: Load) -> Summary:
    """One run of the load. Raises RuntimeError if any request failed: a figure of half a load is none."""
    summary = asyncio.run(run_load(connection, load))
    if summary.errors or summary.completed != load.requests:
        raise RuntimeError(f"{summary.completed} of {load.requests} requests completed; {summary.errors}")
    return summary
