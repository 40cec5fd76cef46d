"""A front's view of all workers: places requests, gathers tokens, carries streams over a worker's death."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker.generation import Generation, GenerationRequest
from worker.messages import ProfileDone, Status
from worker.options import DEFAULT_POOL, PoolOptions
from worker.reports import WorkerReport


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as this front knows it."""

    report: WorkerReport
    is_connected: bool
    status: Status | None
    """The latest; None before the first, or while it does not run."""


class WorkerPool:
    """Used from one asyncio event loop."""

    def __init__(
        self,
        front: int,
        authkey: bytes,
        options: PoolOptions = DEFAULT_POOL,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """`front` names this front in logs; `authkey` is WorkerSupervisor.authkey; `on_change` is called
        when a worker connects or goes, or has_room may have changed."""
        raise NotImplementedError

    def update(self, reports: Sequence[WorkerReport]) -> None:
        """Takes in the supervisor's latest reports: connects to new workers, forgets dead ones."""
        raise NotImplementedError

    async def wait_connected(self) -> None:
        """Until some worker is connected."""
        raise NotImplementedError

    @property
    def open_generations(self) -> int:
        """Requests submitted and not yet closed."""
        raise NotImplementedError

    @property
    def has_room(self) -> bool:
        """Whether some connected worker's queue, as last heard, would admit a request."""
        raise NotImplementedError

    async def submit(self, request: GenerationRequest) -> Generation:
        """Sends the request to a worker, without waiting for its answer. Raises Rejection (NO_WORKER,
        DRAINING, DUPLICATE_ID on this front); the worker's own rejection comes from the first next()."""
        raise NotImplementedError

    async def abort(self, request_id: str) -> bool:
        """Ends the request wherever it is; its answers finish with ABORTED. Whether it was found."""
        raise NotImplementedError

    async def statuses(self, timeout_s: float = 1.0) -> list[WorkerView]:
        """All workers, asked now; one that does not answer in time shows its last status."""
        raise NotImplementedError

    async def profile(self, worker: int, steps: int, timeout_s: float) -> ProfileDone:
        """Per-stage timings of a worker's next steps. Raises Rejection (NO_WORKER)."""
        raise NotImplementedError

    async def close(self) -> None:
        """Cancels everything and closes all connections."""
        raise NotImplementedError
