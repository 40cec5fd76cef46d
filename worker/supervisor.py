"""Starts workers, watches them, starts them anew when they die. Lives in the main process, in asyncio."""

from __future__ import annotations

from collections.abc import Callable

from worker.options import DEFAULT_RESTARTS, RestartPolicy, WorkerOptions
from worker.reports import WorkerReport


class WorkerFailed(Exception):
    """No worker can serve; str() is one clear message, fit to be shown without a traceback."""


class WorkerSupervisor:
    """Used from one asyncio event loop."""

    authkey: bytes
    """Secret of this server's sockets; fronts need it."""

    def __init__(
        self,
        options: WorkerOptions,
        on_change: Callable[[list[WorkerReport]], None] | None = None,
        restarts: RestartPolicy = DEFAULT_RESTARTS,
    ) -> None:
        """`on_change` is called from the event loop with all reports whenever one has changed."""
        raise NotImplementedError

    def start(self) -> None:
        """Starts all workers; to be called once, inside the running event loop."""
        raise NotImplementedError

    def reports(self) -> list[WorkerReport]:
        """By worker index."""
        raise NotImplementedError

    async def wait_ready(self) -> None:
        """Until some worker is ready. Raises WorkerFailed if none can become so."""
        raise NotImplementedError

    async def wait_failed(self) -> str:
        """Until every worker is given up, at start or later; returns the message."""
        raise NotImplementedError

    def drain(self) -> None:
        """Workers admit no new requests; what runs goes on."""
        raise NotImplementedError

    async def stop(self, grace_s: float = 5.0) -> None:
        """Ends all workers: asks, waits, then kills. Idempotent."""
        raise NotImplementedError
