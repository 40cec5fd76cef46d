"""What runs in a worker process, from its first line to its last: load, listen, loop, end.

Only here does an engine come to life. Knows no RPC.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import structlog

from engine.errors import ModelError
from engine.interface import Engine
from worker.links import Links
from worker.loop import WorkerLoop
from worker.messages import Hello
from worker.options import WorkerOptions
from worker.reports import Failed, Loading, Ready, Served, WorkerToSupervisor
from worker.spawning import exit_with_parent
from worker.watchdog import Watchdog

log = structlog.get_logger(__name__)

EXIT_FAULT = 1
EXIT_LOAD = 2
PROGRESS_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Which worker to be."""

    index: int
    generation: int
    options: WorkerOptions
    address: str
    """Where to listen: a path in a folder that only this user can enter."""
    authkey: bytes


def run_worker(spec: WorkerSpec, control: Connection) -> None:
    """The process's main function. Exits 0 when told to stop; else with EXIT_FAULT or EXIT_LOAD.

    SIGTERM ends it as any process, and is survived like any other death: to stop, the main process says so.
    """
    exit_with_parent(before_exit=lambda: _remove_traces(spec))
    if spec.options.configure_logs is not None:
        spec.options.configure_logs(process="worker", worker=spec.index)
    engine = _load(spec, control)
    try:
        _serve(spec, control, engine)
    except Exception as error:
        log.critical("worker_died", generation=spec.generation, exc_info=error)
        _tell(control, Failed(_describe(error), is_user_error=False))
        sys.exit(EXIT_FAULT)
    engine.close()
    # Told to stop, or the main process is gone and this thread noticed it before the other did.
    _remove_traces(spec)


def _load(spec: WorkerSpec, control: Connection) -> Engine:
    from engine.factory import load_engine  # heavy, and wanted in this process alone

    options = replace(spec.options.engine, device=spec.options.engine.device + spec.index)
    started = time.monotonic()
    try:
        engine = load_engine(options, _progress_reporter(control))
    except ModelError as error:
        _tell(control, Failed(str(error), is_user_error=True))
        sys.exit(EXIT_LOAD)
    except MemoryError:  # the next start would have no more of it
        message = (
            "there is not enough memory to load; fewer pages, shorter sequences or a smaller model need less"
        )
        _tell(control, Failed(message, is_user_error=True))
        sys.exit(EXIT_LOAD)
    except Exception as error:
        log.critical("load_failed", generation=spec.generation, exc_info=error)
        _tell(control, Failed(_describe(error), is_user_error=False))
        sys.exit(EXIT_LOAD)
    seconds = round(time.monotonic() - started, 2)
    log.info("engine_loaded", engine=engine.info.engine, device=engine.info.device, seconds=seconds)
    return engine


def _serve(spec: WorkerSpec, control: Connection, engine: Engine) -> None:
    hello = Hello(spec.index, spec.generation, os.getpid(), engine.info, engine.capacity)
    links = Links(control, hello)
    watchdog = Watchdog(spec.options.hang_timeout_s)
    loop = WorkerLoop(
        spec.index, engine, spec.options.scheduler, links, watchdog, lambda: _tell(control, Served())
    )
    watchdog.start()
    links.listen(spec.address, spec.authkey)
    _tell(control, Ready(spec.address, engine.info, engine.capacity))
    # What loading left behind lives as long as the process: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    loop.run()
    links.close()


def _progress_reporter(control: Connection) -> Callable[[str, float], None]:
    last_stage, last_time = "", 0.0

    def report(stage: str, fraction: float) -> None:
        nonlocal last_stage, last_time
        now = time.monotonic()
        if stage != last_stage or now - last_time >= PROGRESS_INTERVAL_S:
            last_stage, last_time = stage, now
            _tell(control, Loading(stage, fraction))

    return report


def _tell(control: Connection, message: WorkerToSupervisor) -> None:
    with suppress(OSError):  # the main process is gone, and exit_with_parent about to act on it
        control.send(message)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _remove_traces(spec: WorkerSpec) -> None:
    """The main process, if it was killed, cannot clear up: the last worker out removes the folder."""
    address = Path(spec.address)
    with suppress(OSError):
        address.unlink()
    with suppress(OSError):
        address.parent.rmdir()
