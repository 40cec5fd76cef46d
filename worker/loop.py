"""The worker's one thread: messages in, a step plan to the engine, tokens out. One turn is one step.

Step n + 1 is handed to the engine before step n's tokens are read, as deep as the engine likes. All that
a step has for one front leaves in one message. Knows no process, no CUDA and no model.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from engine.interface import Engine, StepHandle, StepPlan
from worker.instruments import WorkerInstruments
from worker.links import FrontGone, Links
from worker.messages import (
    Abort,
    AbortDone,
    Cancel,
    Finished,
    FinishReason,
    FrontToWorker,
    Ping,
    ProfileStart,
    Rejected,
    RejectReason,
    SetPaused,
    Status,
    StepTokens,
    Submit,
    TrialStarted,
)
from worker.profiling import StageClock
from worker.quarantine import Quarantine
from worker.reports import Drain, Stop, SupervisorToWorker
from worker.scheduler import Scheduler, SchedulerOptions
from worker.suspects import proof_tokens
from worker.watchdog import Watchdog

log = structlog.get_logger(__name__)

STATUS_INTERVAL_S = 1.0
FULL_STATUS_INTERVAL_S = 0.05
"""While the queue is full: fronts wait to hear that there is room again."""
STEPS_TO_HAVE_SERVED = 64


@dataclass(slots=True)
class _Step:
    """A step under way."""

    handle: StepHandle
    executed_at: float
    rows: int


class WorkerLoop:
    """Serves all fronts of one worker until it is told to stop."""

    def __init__(
        self,
        worker: int,
        engine: Engine,
        options: SchedulerOptions,
        links: Links,
        watchdog: Watchdog,
        on_served: Callable[[], None],
    ) -> None:
        """`on_served` is called once, when a sequence has finished or a good many steps have gone well."""
        self._engine = engine
        self._links = links
        self._options = options
        self._watchdog = watchdog
        self._instruments = WorkerInstruments(worker)
        self._scheduler = Scheduler(engine.capacity, options, time.monotonic, self._instruments)
        self._quarantine = Quarantine(proof_tokens(engine.capacity), options.max_queued, time.monotonic)
        self._stages = StageClock(time.monotonic)
        self._under_way: deque[_Step] = deque()
        self._on_served = on_served
        self._steps_to_have_served = STEPS_TO_HAVE_SERVED
        self._is_stopped = False
        self._is_busy = False
        self._next_status = 0.0
        self._has_room = True
        self._is_status_stale = False

    def run(self) -> None:
        """Raises what the engine raises: the worker cannot go on then."""
        while not self._is_stopped:
            self._receive()
            self._step()
            self._report()
        self._finish_all()

    # ---- one step

    def _step(self) -> None:
        plan = self._scheduler.plan()
        self._stages.lap("schedule")
        self._watchdog.begin()
        if plan is not None:
            self._execute(plan)
        self._stages.lap("execute")
        engine_us = None
        if self._under_way and (plan is None or self._under_way[0].handle.is_done()):
            engine_us = self._collect()
        self._watchdog.end()
        self._stages.lap("collect")
        self._send()
        self._stages.lap("send")
        if engine_us is not None:
            self._stages.end_step(engine_us)
        self._is_busy = plan is not None or engine_us is not None or bool(self._under_way)

    def _execute(self, plan: StepPlan) -> None:
        rows = len(plan.decodes) + sum(len(chunk.tokens) for chunk in plan.prefills)
        executed_at = time.monotonic()  # before the call: an engine may compute inside it
        self._under_way.append(_Step(self._engine.execute(plan), executed_at, rows))

    def _collect(self) -> dict[str, float]:
        step = self._under_way.popleft()
        result = step.handle.result()
        tokens = self._scheduler.collect(result)
        self._instruments.step_collected(time.monotonic(), step.executed_at, step.rows, tokens)
        if self._steps_to_have_served:
            self._count_towards_served(1)
        return result.stage_us

    def _send(self) -> None:
        for front, message in self._scheduler.take_outputs().items():
            self._quarantine.observe(front, message)
            if self._steps_to_have_served and message.finished:
                self._count_towards_served(STEPS_TO_HAVE_SERVED)
            self._links.send(front, message)

    def _count_towards_served(self, steps: int) -> None:
        self._steps_to_have_served = max(0, self._steps_to_have_served - steps)
        if not self._steps_to_have_served:
            self._on_served()

    # ---- messages

    def _receive(self) -> None:
        self._stages.begin()
        incoming = self._links.poll(self._time_to_wait())
        if not self._is_busy:
            self._stages.begin()
        for front, message in incoming:
            self._handle(front, message)
        if not self._quarantine.is_quiet:
            for front, submit in self._quarantine.releases():
                self._start(front, submit)
        self._stages.lap("receive")

    def _time_to_wait(self) -> float | None:
        """Seconds for which nothing need be done, should no message come; None: for ever."""
        if self._is_busy:
            return 0
        deadlines = (
            self._scheduler.next_deadline(),
            self._stages.next_deadline(),
            self._next_status if self._is_status_stale else None,
        )
        soonest = min((deadline for deadline in deadlines if deadline is not None), default=None)
        return None if soonest is None else max(0.0, soonest - time.monotonic())

    def _handle(self, front: int, message: FrontToWorker | FrontGone | SupervisorToWorker) -> None:
        match message:
            case Submit():
                self._submit(front, message)
            case Cancel(keys):
                self._quarantine.cancel(front, keys)
                self._scheduler.cancel(front, keys)
            case SetPaused(key, paused):
                if paused:
                    self._quarantine.end_trial(front, (key,))
                self._scheduler.set_paused(front, key, paused)
            case Abort(request_id, ticket):
                self._links.send(front, AbortDone(ticket, self._abort(request_id)))
            case Ping(ticket):
                self._links.send(front, self._status(ticket))
            case ProfileStart():
                self._stages.start(front, message)
            case FrontGone():
                self._quarantine.drop_front(front)
                self._scheduler.drop_front(front)
                self._stages.drop_front(front)
            case Drain():
                self._scheduler.begin_drain()
                self._is_status_stale = True
            case Stop():
                self._is_stopped = True

    def _submit(self, front: int, submit: Submit) -> None:
        if self._quarantine.is_quiet and not submit.is_suspect:
            self._start(front, submit)
        elif rejected := self._quarantine.hold(front, submit):
            self._reject(front, rejected)

    def _start(self, front: int, submit: Submit) -> None:
        if submit.is_suspect:
            self._links.send(front, TrialStarted(submit.key))
        try:
            rejected = self._scheduler.submit(front, submit)
        except ValueError as error:
            # A front checks requests before it sends them; one that slips through must not hurt others.
            log.error("submission_malformed", request_id=submit.request_id, reason=str(error))
            self._finish(front, submit, FinishReason.FAULT, str(error))
            return
        if rejected is not None:
            self._reject(front, rejected)

    def _reject(self, front: int, rejected: Rejected) -> None:
        self._quarantine.end_trial(front, (rejected.key,))
        if rejected.reason is RejectReason.QUEUE_FULL and self._has_room:
            self._is_status_stale = True
            self._next_status = 0.0
        self._links.send(front, rejected)

    def _abort(self, request_id: str) -> bool:
        held = self._quarantine.abort(request_id)
        for waiting in held:
            self._finish(waiting.front, waiting.submit, FinishReason.ABORTED)
        return self._scheduler.abort(request_id) or bool(held)

    def _finish(self, front: int, submit: Submit, reason: FinishReason, message: str = "") -> None:
        """Ends a request that the scheduler does not hold."""
        keys = range(submit.key, submit.key + submit.n)
        self._quarantine.end_trial(front, keys)
        finished = [Finished(key, reason, message) for key in keys]
        self._links.send(front, StepTokens([], [], [], finished=finished))

    def _finish_all(self) -> None:
        """The worker stops: whoever still waits for tokens hears so."""
        reason, message = FinishReason.ABORTED, "the server is stopping"
        for held in self._quarantine.take_all():
            self._finish(held.front, held.submit, reason, message)
        self._scheduler.finish_all(reason, message)
        self._send()

    # ---- what fronts hear unasked

    def _report(self) -> None:
        for front, done in self._stages.finished():
            self._links.send(front, done)
        if self._is_busy:
            self._is_status_stale = True
        else:
            self._instruments.went_idle()
        now = time.monotonic()
        if self._is_status_stale and now >= self._next_status:
            self._is_status_stale = self._is_busy
            status = self._status(None)
            self._links.broadcast(status)
            self._has_room = status.has_room
            self._next_status = now + (STATUS_INTERVAL_S if status.has_room else FULL_STATUS_INTERVAL_S)

    def _status(self, ticket: int | None) -> Status:
        stats = self._scheduler.stats()
        held = self._quarantine.sequences_held
        waiting = stats.waiting + held
        may_wait = self._options.max_queued + stats.slots - stats.running
        return Status(
            ticket,
            running=stats.running,
            waiting=waiting,
            paused=stats.paused,
            slots=stats.slots,
            pages=stats.pages,
            pages_free=stats.pages_free,
            pages_cached=stats.pages_cached,
            steps=stats.steps,
            preemptions=stats.preemptions,
            is_draining=stats.is_draining,
            metrics=self._instruments.export(stats, held),
            has_room=waiting < may_wait and not stats.is_draining,
        )
