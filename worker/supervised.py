"""One worker process as its supervisor holds it: a pipe to talk over, and its end noticed at once."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from contextlib import suppress

from worker.process import WorkerSpec, run_worker
from worker.reports import SupervisorToWorker, WorkerToSupervisor
from worker.spawning import spawn_process


class SupervisedProcess:
    """Starts on creation; calls back from the running event loop."""

    def __init__(
        self,
        spec: WorkerSpec,
        on_message: Callable[[WorkerToSupervisor], None],
        on_death: Callable[[int], None],
    ) -> None:
        """`on_death` gets the exit code, as multiprocessing has it, after the last message; once."""
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_death = on_death
        self._ended = asyncio.Event()
        self._control, theirs = multiprocessing.Pipe()
        name = f"slipstream-worker-{spec.index}.{spec.generation}"
        self._process = spawn_process(run_worker, (spec, theirs), name)
        theirs.close()
        self.pid = self._process.pid
        self._loop.add_reader(self._control.fileno(), self._read)
        self._sentinel = self._process.sentinel
        self._loop.add_reader(self._sentinel, self._end)

    def send(self, message: SupervisorToWorker) -> None:
        """A worker that is gone is no error: its death is reported anyway."""
        with suppress(OSError):
            self._control.send(message)

    def kill(self) -> None:
        """Ends the process even while it loads and reads no messages; it holds nothing worth saving."""
        self._process.kill()

    async def wait_or_kill(self, grace_s: float) -> None:
        """Returns once the process has ended and on_death was called."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), grace_s)
        if not self._ended.is_set():
            self._process.kill()
            await self._ended.wait()

    def _read(self) -> None:
        try:
            while self._control.poll():
                self._on_message(self._control.recv())
        except (EOFError, OSError):
            self._loop.remove_reader(self._control.fileno())

    def _end(self) -> None:
        self._loop.remove_reader(self._sentinel)
        self._read()
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        # The sentinel closes while the kernel still takes the process apart; after join its sockets are
        # closed too, so whoever hears of the death finds their end of file.
        self._process.join()
        exit_code = self._process.exitcode
        self._process.close()
        self._on_death(exit_code if exit_code is not None else 0)
        self._ended.set()
