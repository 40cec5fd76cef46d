"""How many threads BLAS runs on. Knows no engine."""

from __future__ import annotations

import os

from threadpoolctl import ThreadpoolController


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class BlasThreads:
    """Holds the process's BLAS at a number of threads until closed; None takes all usable cores.

    Results may differ in the last bit between numbers of threads; for one number they do not vary.
    """

    def __init__(self, threads: int | None) -> None:
        self.count = usable_cores() if threads is None else threads
        controller = ThreadpoolController()
        self._limit = controller.limit(limits=self.count, user_api="blas")
        self.library = ", ".join(
            f"{entry['internal_api']} {entry.get('version')} ({entry.get('architecture', 'unknown')})"
            for entry in controller.select(user_api="blas").info()
        )
        """Name, version and kernel set of the BLAS in use, for people."""

    def close(self) -> None:
        """Gives BLAS its former number of threads back. Idempotent."""
        self._limit.restore_original_limits()
