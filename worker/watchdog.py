"""Ends a worker whose engine hangs, so that a new one can take over. Knows no engine."""

from __future__ import annotations

import os
import threading
import time

import structlog

log = structlog.get_logger(__name__)

EXIT_HUNG = 70
"""Exit status of a worker that ended itself because a step took too long."""


class Watchdog:
    """The loop brackets its waits for the engine with begin() and end(); a thread looks on."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._begun_at: float | None = None

    def start(self) -> None:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def begin(self) -> None:
        self._begun_at = time.monotonic()

    def end(self) -> None:
        self._begun_at = None

    def _watch(self) -> None:
        while True:
            time.sleep(min(10.0, self._limit_s / 4))
            begun_at = self._begun_at
            if begun_at is not None and time.monotonic() - begun_at > self._limit_s:
                log.critical("step_hangs", limit_s=self._limit_s)
                os._exit(EXIT_HUNG)
