"""One server for all tests that only look at a running one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.server_process import ServerProcess, free_port, running_server


@pytest.fixture(scope="session")
def server(tiny_checkpoint: Path) -> Iterator[ServerProcess]:
    """Two fronts, one worker, steps of 2 ms. Tests may kill its children, and must leave it serving."""
    flags = ("--engine", "simulated", "--simulated-step-us", "2000", "--fronts", "2", "--log-level", "debug")
    with running_server(tiny_checkpoint, *flags, metrics_port=free_port()) as running:
        yield running
