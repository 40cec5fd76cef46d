"""Continuous batching: decides what the engine runs next, and sorts what it produced by front.

Pure Python: knows slots, pages and token budgets; knows no engine, queue, process or wall clock. The
owner calls it from one thread:

    while not done:
        ... submit, cancel, abort, set_paused as messages come in ...
        if (plan := scheduler.plan()) is not None:
            handles.append(engine.execute(plan))
        if handles and (no plan could be made or handles[0].is_done()):
            scheduler.collect(handles.popleft().result())
        for front, message in scheduler.take_outputs().items():
            send(front, message)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.interface import EngineCapacity, StepPlan, StepResult
from worker.messages import FinishReason, Rejected, StepTokens, Submit
from worker.scheduling.options import SchedulerOptions
from worker.scheduling.stats import SchedulerObserver, SchedulerStats, SequenceSummary

__all__ = ["Scheduler", "SchedulerObserver", "SchedulerOptions", "SchedulerStats", "SequenceSummary"]

Clock = Callable[[], float]
"""Seconds, monotonic."""


class Scheduler:
    """Requests in; step plans and messages out."""

    def __init__(
        self,
        capacity: EngineCapacity,
        options: SchedulerOptions,
        clock: Clock,
        observer: SchedulerObserver | None = None,
    ) -> None:
        """Raises ValueError where options and capacity do not fit together."""
        raise NotImplementedError

    # ---- from the fronts

    def submit(self, front: int, message: Submit) -> Rejected | None:
        """Queues a request's sequences; None if admitted, else the message to send back.

        A draining scheduler still takes resubmissions: their clients already have part of an answer.
        Raises ValueError if the message breaks its own contract (empty prompt, max_tokens < 1, …).
        """
        raise NotImplementedError

    def cancel(self, front: int, keys: Iterable[int]) -> None:
        """Ends sequences in silence; keys that are not (or no longer) there are ignored."""
        raise NotImplementedError

    def abort(self, request_id: str) -> bool:
        """Ends all answers of a request; False if it is unknown, which is then remembered for a while."""
        raise NotImplementedError

    def set_paused(self, front: int, key: int, paused: bool) -> None:
        """Parks a sequence without slot and pages, or puts it back in line; unknown keys are ignored."""
        raise NotImplementedError

    def drop_front(self, front: int) -> None:
        """A front is gone: ends its sequences in silence and forgets what it had coming."""
        raise NotImplementedError

    def begin_drain(self) -> None:
        """From now on new requests are rejected; what is queued or running goes on to its end."""
        raise NotImplementedError

    def finish_all(self, reason: FinishReason, message: str = "") -> None:
        """Ends every sequence now, with tokens collected so far and a Finished each."""
        raise NotImplementedError

    # ---- to and from the engine

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run now (no work, or pipeline_depth steps under way).

        Also ends what has passed its deadline, so call it when next_deadline() comes even if idle. A
        plan counts as under way at once: every plan must be executed, and its result collected.
        """
        raise NotImplementedError

    def collect(self, result: StepResult) -> int:
        """Takes the result of the oldest step under way; the number of tokens it gave to sequences."""
        raise NotImplementedError

    def take_outputs(self) -> dict[int, StepTokens]:
        """By front, all that is new since the last call; each key at most once in `keys`.

        Fronts with no news are not in it.
        """
        raise NotImplementedError

    # ---- what is going on

    @property
    def steps_under_way(self) -> int:
        """Plans made whose results have not been collected."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Whether a sequence is running or in line (paused ones do not count) or a step is under way."""
        raise NotImplementedError

    @property
    def is_idle(self) -> bool:
        """Whether no sequence exists, not even a paused one, and no step is under way."""
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        """When the next sequence's time is up, by the clock; None if no sequence has a deadline."""
        raise NotImplementedError

    def stats(self) -> SchedulerStats:
        """Counts for status and metrics."""
        raise NotImplementedError
