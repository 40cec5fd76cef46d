"""What a person who starts a server sees: progress while it loads, one line when it is ready, what a drain
waits for. Facts for scripts go to stdout, all else to stderr.

On a terminal, progress is a bar; elsewhere (a log file, a container) it is one log event for each stage.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

import structlog

from worker.client import WorkerReport, WorkerState

if TYPE_CHECKING:
    from rich.progress import TaskID

log = structlog.get_logger("service.console")


class Console:
    """Shows one thing at a time. Used from one thread, `model_progress` excepted."""

    def __init__(self) -> None:
        self._bar = _ProgressBar() if sys.stderr.isatty() else None
        self._last_stage: dict[str, str] = {}
        self._last_left: int | None = None

    def progress(self, what: str, stage: str, share: float) -> None:
        """`what` ("model", "worker 0") is at `stage`, and done to `share`, 0 to 1. From any thread."""
        if self._bar is not None:
            self._bar.show(what, stage, share)
        elif self._last_stage.get(what) != stage:
            self._last_stage[what] = stage
            log.info("loading", what=what, stage=stage, progress=round(share, 3))

    def workers(self, reports: Sequence[WorkerReport]) -> None:
        """The progress of all workers that load."""
        for report in reports:
            name = f"worker {report.index}"
            if report.state is WorkerState.LOADING and report.load_stage:
                self.progress(name, report.load_stage, report.load_progress)
            elif self._bar is not None:
                self._bar.remove(name)

    def listening(self, address: str) -> None:
        """Connections are taken; requests are not yet."""
        _say(sys.stdout, f"listening on {address}")

    def ready(self, line: str) -> None:
        self.end_progress()
        _say(sys.stdout, line)

    def draining(self, left: int) -> None:
        """What a drain still waits for; nothing is said where there was nothing to wait for."""
        if left != self._last_left and (left or self._last_left):
            self._last_left = left
            streams = "stream" if left == 1 else "streams"
            _say(sys.stderr, f"draining: {left} {streams} left")

    def error(self, message: str) -> None:
        self.end_progress()
        red, plain = ("\x1b[31m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
        _say(sys.stderr, f"{red}error: {message}{plain}")

    def end_progress(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_progress()


def _say(stream: TextIO, line: str) -> None:
    """A reader that went away (`slipstream serve | head -1`) is no reason to end the server."""
    with contextlib.suppress(OSError):
        print(line, file=stream, flush=True)


class _ProgressBar:
    """One bar for each thing that loads."""

    def __init__(self) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=RichConsole(stderr=True), transient=True)
        self._tasks: dict[str, TaskID] = {}

    def show(self, what: str, stage: str, share: float) -> None:
        self._progress.start()
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=1.0)
        self._progress.update(self._tasks[what], completed=share, description=f"{what}: {stage}")

    def remove(self, what: str) -> None:
        if what in self._tasks:
            self._progress.remove_task(self._tasks.pop(what))
            if not self._tasks:
                self.stop()

    def stop(self) -> None:
        self._progress.stop()
