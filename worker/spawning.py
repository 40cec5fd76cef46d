"""Starts a fresh Python process that runs one function, and lets such a process notice its parent's end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Set
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any


def spawn_process(
    target: Callable[..., None],
    args: tuple[Any, ...],
    name: str,
    blocked_signals: Set[signal.Signals] = frozenset({signal.SIGINT}),
) -> BaseProcess:
    """Starts `target(*args)`, an importable function, in a new process. Call from the main thread.

    The child imports the target's module and nothing else: multiprocessing would also run this program's
    main module there, and a worker has no use for a command line and an RPC server (0.5 s to import).
    It starts with `blocked_signals` blocked, from its first instruction on: Ctrl-C reaches the whole process
    group, and when a child is to end is its parent's decision.
    """
    process = multiprocessing.get_context("spawn").Process(target=target, args=args, name=name)
    # Otherwise the first child's start() would start it, and that unblocks signals again.
    resource_tracker.ensure_running()
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked_signals)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        sys.modules["__main__"] = main
    return process


def exit_with_parent(before_exit: Callable[[], None] | None = None) -> None:
    """Ends this process at once when its parent's does, however busy or idle it is, by whatever death.

    Watches, in a thread, the pipe that multiprocessing keeps open between a parent and its child: kernels
    close it for a process that was killed outright.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("not started by multiprocessing")

    def watch(sentinel: int) -> None:
        wait([sentinel])
        try:
            if before_exit is not None:
                before_exit()
        finally:
            os._exit(1)

    threading.Thread(target=watch, args=(parent.sentinel,), name="parent-watch", daemon=True).start()
