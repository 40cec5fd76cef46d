"""A front's view of all workers: places requests, gathers tokens, carries streams over a worker's death.

What became of a lost connection is told by the supervisor's reports: if the worker died, its sequences are
judged (suspects.py) and sent to another worker, or to the next generation as soon as it is up; if it still
lives, they are sent to it again (recovery.py). Knows no RPC and no text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from worker.answers import Answer, AnswerFinished, AnswerStarted
from worker.connection import WorkerConnection
from worker.generation import Generation, GenerationRequest, Rejection
from worker.homes import Homes
from worker.messages import (
    Cancel,
    FinishReason,
    ProfileDone,
    Rejected,
    RejectReason,
    SetPaused,
    Status,
    StepTokens,
    Submit,
    TrialStarted,
    WorkerToFront,
)
from worker.options import DEFAULT_POOL, PoolOptions
from worker.placement import Placement
from worker.recovery import Recovery
from worker.reports import WorkerReport, WorkerState
from worker.roster import RETRY_AFTER_S, Roster, WorkerView
from worker.suspects import proof_tokens

log = structlog.get_logger(__name__)


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
        self._options = options
        self._on_change = on_change
        self._roster = Roster(front, authkey, options, self)
        self._homes = Homes()
        self._generations: dict[str, Generation] = {}
        self._placement = Placement(options.imbalance, options.remembered_prefixes)
        self._recovery = Recovery(
            self._roster, self._homes, self._placement, options, self.cancel, log.bind(front=front)
        )
        self._next_key = 0

    # ---- workers

    def update(self, reports: Sequence[WorkerReport]) -> None:
        """Takes in the supervisor's latest reports: connects to new workers, forgets dead ones."""
        self._roster.update(reports)
        self._recovery.place()
        self._notify()

    async def wait_connected(self) -> None:
        """Until some worker is connected."""
        await self._roster.wait_connected()

    @property
    def has_room(self) -> bool:
        """Whether some connected worker's queue, as last heard, would admit a request."""
        return any(ready.status is None or ready.status.has_room for ready in self._roster.ready())

    async def statuses(self, timeout_s: float = 1.0) -> list[WorkerView]:
        """All workers, asked now; one that does not answer in time shows its last status."""
        return await self._roster.statuses(timeout_s)

    async def profile(self, worker: int, steps: int, timeout_s: float) -> ProfileDone:
        """Per-stage timings of a worker's next steps; fewer if time runs out, or none while it is idle.

        Raises Rejection (NO_WORKER).
        """
        return await self._roster.profile(worker, steps, timeout_s)

    async def close(self) -> None:
        """Cancels everything and closes all connections."""
        self._on_change = None
        for generation in list(self._generations.values()):
            generation.close()
        await self._roster.close()

    def _notify(self) -> None:
        if self._on_change is not None:
            self._on_change()

    # ---- requests

    async def submit(self, request: GenerationRequest) -> Generation:
        """Sends the request to a worker, without waiting for its answer. Raises Rejection (NO_WORKER,
        DRAINING, DUPLICATE_ID on this front); the worker's own rejection comes from the first next()."""
        if request.request_id in self._generations:
            message = f"a request with id {request.request_id} is in flight"
            raise Rejection(RejectReason.DUPLICATE_ID, message)
        generation = Generation(request, self._next_key, self)
        if request.time_left_s is not None:
            generation.deadline = asyncio.get_running_loop().time() + request.time_left_s
        connection = self._choose(generation)
        if connection is None:
            raise self._no_worker()
        self._next_key += request.n
        self._generations[request.request_id] = generation
        self._send(connection, generation)
        return generation

    async def abort(self, request_id: str) -> bool:
        """Ends the request wherever it is; its answers finish with ABORTED. Whether it was found."""
        generation = self._generations.get(request_id)
        is_ours = False
        if generation is not None:
            is_ours = not all(answer.is_over for answer in generation.answers)
            for answer in generation.answers:
                if self._recovery.orphans.remove(answer.key) is not None:
                    generation.end(answer, AnswerFinished(FinishReason.ABORTED))
        return await self._roster.abort(request_id) or is_ours

    def cancel(self, generation: Generation, answers: list[Answer]) -> None:
        """For generations: nobody wants these answers any more."""
        keys: dict[WorkerConnection, list[int]] = {}
        for answer in answers:
            self._recovery.orphans.remove(answer.key)
            home = self._homes.leave(answer.key)
            if home is not None:
                keys.setdefault(home, []).append(answer.key)
        for home, cancelled in keys.items():
            home.send(Cancel(tuple(cancelled)))

    def resume(self, generation: Generation, answer: Answer) -> None:
        """For generations: what had gathered of a paused answer was read."""
        answer.is_paused = False
        home = self._homes.of(answer.key)
        if home is not None:
            home.send(SetPaused(answer.key, False))
        else:
            self._recovery.orphans.resume(answer.key)
            self._recovery.place()

    def forget(self, generation: Generation) -> None:
        """For generations: the request is closed."""
        self._generations.pop(generation.request.request_id, None)

    def _choose(self, generation: Generation) -> WorkerConnection | None:
        """Where a new request may go."""
        loads = {
            connection.worker: connection.load
            for connection in self._roster.ready()
            if self._roster.report(connection.worker).state is WorkerState.READY
            and connection.worker not in generation.tried
        }
        if not loads:
            return None
        worker = self._placement.choose(loads, generation.prompt, generation.request.cache_salt)
        return self._roster.connection(worker)

    def _no_worker(self) -> Rejection:
        states = self._roster.states()
        if WorkerState.DRAINING in states:
            return Rejection(RejectReason.DRAINING, "the server is draining")
        if states == {WorkerState.FAILED}:
            return Rejection(RejectReason.NO_WORKER, "the model's workers have failed")
        message = "the model is loading"
        if WorkerState.RESTARTING in states:
            message = "the model's worker is being restarted"
        return Rejection(RejectReason.NO_WORKER, message, RETRY_AFTER_S)

    def _send(self, connection: WorkerConnection, generation: Generation) -> None:
        request = generation.request
        for answer in generation.answers:
            self._homes.settle(connection, generation, answer)
        connection.send(
            Submit(
                generation.answers[0].key,
                request.request_id,
                generation.prompt,
                request.sampling,
                request.max_tokens,
                n=request.n,
                priority=request.priority,
                cache_salt=request.cache_salt,
                time_left_s=generation.time_left_s(),
            )
        )

    # ---- messages

    def on_ready(self, connection: WorkerConnection) -> None:
        """For the roster: a worker takes requests."""
        self._placement.forget(connection.worker)
        self._recovery.ready(connection)
        self._notify()

    def on_message(self, connection: WorkerConnection, message: WorkerToFront) -> None:
        """For the roster: a message that is no reply."""
        match message:
            case StepTokens():
                self._take_step(connection, message)
            case Rejected():
                self._take_rejection(connection, message)
            case TrialStarted(key):
                self._start_trial(connection, key)
            case Status():
                self._notify()

    def _take_step(self, connection: WorkerConnection, message: StepTokens) -> None:
        in_flight = connection.in_flight
        for started in message.started:
            connection.started(started.key)
            if (entry := in_flight.get(started.key)) is not None and entry[1].started is None:
                entry[1].started = AnswerStarted(started.cached_tokens, started.queue_s)
                entry[0].notify(entry[1])
        for key, prompt_logprobs in message.prompt_logprobs.items():
            if (entry := in_flight.get(key)) is not None:
                entry[0].set_prompt_logprobs(prompt_logprobs)
                entry[0].notify(entry[1])
        for key, logprobs in message.logprobs.items():
            if (entry := in_flight.get(key)) is not None:
                entry[1].add_logprobs(logprobs)
        tokens, start, pause_at = message.tokens, 0, self._options.pause_at
        for key, count in zip(message.keys, message.counts, strict=True):
            end = start + count
            if (entry := in_flight.get(key)) is not None:
                generation, answer = entry
                answer.append(tokens[start:end])
                generation.notify(answer)
                if answer.unread >= pause_at and not answer.is_paused:
                    self._pause(connection, answer)
            start = end
        for finished in message.finished:
            if (entry := in_flight.get(finished.key)) is not None:
                self._homes.leave(finished.key)
                end_state = AnswerFinished(finished.reason, finished.message, finished.preemptions)
                entry[0].end(entry[1], end_state)

    def _pause(self, connection: WorkerConnection, answer: Answer) -> None:
        answer.is_paused = True
        if answer.suspicion is not None:
            answer.suspicion.halted()
        connection.send(SetPaused(answer.key, True))

    def _take_rejection(self, connection: WorkerConnection, rejected: Rejected) -> None:
        entry = connection.in_flight.get(rejected.key)
        if entry is None:
            return
        generation, answer = entry
        if generation.was_resubmitted:
            # The client has part of the answer, so this is no longer a matter of admission.
            self._homes.leave(rejected.key)
            is_aborted = rejected.reason is RejectReason.ABORTED_BEFORE
            reason = FinishReason.ABORTED if is_aborted else FinishReason.FAULT
            generation.end(answer, AnswerFinished(reason, rejected.message))
            return
        for each in generation.answers:
            self._homes.leave(each.key)
        generation.tried.add(connection.worker)
        may_go_elsewhere = rejected.reason in (RejectReason.QUEUE_FULL, RejectReason.DRAINING)
        other = self._choose(generation) if may_go_elsewhere else None
        if other is not None:
            self._send(other, generation)
        else:
            generation.reject(Rejection(rejected.reason, rejected.message, rejected.retry_after_s))

    def _start_trial(self, connection: WorkerConnection, key: int) -> None:
        entry = connection.in_flight.get(key)
        if entry is not None and entry[1].suspicion is not None and connection.hello is not None:
            entry[1].suspicion.trial_started(proof_tokens(connection.hello.capacity))

    # ---- faults

    def on_lost(self, connection: WorkerConnection) -> None:
        """For the roster: a connection is over, after its last message."""
        self._recovery.lost(connection)
        self._notify()

    def on_report(self, report: WorkerReport) -> None:
        """For the roster: news of a worker."""
        self._recovery.hear(report)
