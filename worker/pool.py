"""A front's view of all workers: places requests, gathers tokens, carries streams over a worker's death.

What became of a lost connection is told by the supervisor's reports: if the worker died, its sequences are
judged (suspects.py) and sent to another worker, or to the next generation as soon as it is up; if it still
lives, they are sent to it again. Knows no RPC and no text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from worker.answers import Answer, AnswerFinished, AnswerStarted
from worker.connection import WorkerConnection
from worker.generation import Generation, GenerationRequest, Rejection
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
from worker.orphans import Orphan, Orphans
from worker.placement import Placement
from worker.reports import WorkerDeath, WorkerReport, WorkerState
from worker.roster import RETRY_AFTER_S, Roster, WorkerView
from worker.suspects import Suspicion, proof_tokens

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
        self._log = log.bind(front=front)
        self._roster = Roster(front, authkey, options, self)
        self._homes: dict[int, WorkerConnection] = {}
        """By key, where a sequence is in flight."""
        self._generations: dict[str, Generation] = {}
        self._orphans = Orphans(options.orphan_wait_s)
        self._placement = Placement(options.imbalance, options.remembered_prefixes)
        self._next_key = 0

    # ---- workers

    def update(self, reports: Sequence[WorkerReport]) -> None:
        """Takes in the supervisor's latest reports: connects to new workers, forgets dead ones."""
        self._roster.update(reports)
        self._place_orphans()
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
                if self._orphans.remove(answer.key) is not None:
                    generation.end(answer, AnswerFinished(FinishReason.ABORTED))
        return await self._roster.abort(request_id) or is_ours

    def cancel(self, generation: Generation, answers: list[Answer]) -> None:
        """For generations: nobody wants these answers any more."""
        keys: dict[WorkerConnection, list[int]] = {}
        for answer in answers:
            self._orphans.remove(answer.key)
            home = self._homes.pop(answer.key, None)
            if home is not None:
                home.remove(answer.key)
                keys.setdefault(home, []).append(answer.key)
        for home, cancelled in keys.items():
            home.send(Cancel(tuple(cancelled)))

    def resume(self, generation: Generation, answer: Answer) -> None:
        """For generations: what had gathered of a paused answer was read."""
        answer.is_paused = False
        home = self._homes.get(answer.key)
        if home is not None:
            home.send(SetPaused(answer.key, False))
        else:
            self._orphans.resume(answer.key)
            self._place_orphans()

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
            connection.add(generation, answer)
            self._homes[answer.key] = connection
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
                time_left_s=_time_left(generation),
            )
        )

    # ---- messages

    def on_ready(self, connection: WorkerConnection) -> None:
        """For the roster: a worker takes requests."""
        self._placement.forget(connection.worker)
        # The same generation again: only the connection had broken, and nobody is to blame.
        self._orphans.settle((connection.worker, connection.generation), lambda _orphan: None)
        self._place_orphans()
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
                self._leave(connection, finished.key)
                end_state = AnswerFinished(finished.reason, finished.message, finished.preemptions)
                entry[0].end(entry[1], end_state)

    def _pause(self, connection: WorkerConnection, answer: Answer) -> None:
        answer.is_paused = True
        if answer.suspicion is not None:
            answer.suspicion.halted()
        connection.send(SetPaused(answer.key, True))

    def _leave(self, connection: WorkerConnection, key: int) -> None:
        connection.remove(key)
        self._homes.pop(key, None)

    def _take_rejection(self, connection: WorkerConnection, rejected: Rejected) -> None:
        entry = connection.in_flight.get(rejected.key)
        if entry is None:
            return
        generation, answer = entry
        if generation.was_resubmitted:
            # The client has part of the answer, so this is no longer a matter of admission.
            self._leave(connection, rejected.key)
            is_aborted = rejected.reason is RejectReason.ABORTED_BEFORE
            reason = FinishReason.ABORTED if is_aborted else FinishReason.FAULT
            generation.end(answer, AnswerFinished(reason, rejected.message))
            return
        for each in generation.answers:
            self._leave(connection, each.key)
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
        for generation, answer in connection.in_flight.values():
            self._homes.pop(answer.key, None)
            self._orphans.add(generation, answer, (connection.worker, connection.generation))
        self.on_report(self._roster.report(connection.worker))
        self._place_orphans()
        self._notify()

    def on_report(self, report: WorkerReport) -> None:
        """For the roster: news of a worker, perhaps of a death that orphans wait to hear of."""
        for generation in self._orphans.places(report.index):
            if report.has_ended(generation):
                self._judge_death(report, generation)

    def _judge_death(self, report: WorkerReport, generation: int) -> None:
        death = next((death for death in report.deaths if death.generation == generation), None)
        self._orphans.settle((report.index, generation), lambda orphan: self._judge(orphan, death))

    def _judge(self, orphan: Orphan, death: WorkerDeath | None) -> None:
        answer = orphan.answer
        if answer.is_paused:
            return  # it held no slot, so it cannot have done it
        if answer.suspicion is None:
            answer.suspicion = Suspicion()
        verdict = answer.suspicion.worker_died(death, self._options.max_deaths)
        if verdict is None:
            return
        generation = orphan.generation
        self._log.error("request_given_up", request_id=generation.request.request_id, reason=verdict)
        remaining = [each for each in generation.answers if not each.is_over]
        self.cancel(generation, remaining)
        for each in remaining:
            generation.end(each, AnswerFinished(FinishReason.FAULT, verdict))

    def _place_orphans(self) -> None:
        if not self._orphans:
            return
        if self._roster.states() == {WorkerState.FAILED}:
            self._orphans.fail_all("the model's workers have failed")
        loads = {connection.worker: connection.load for connection in self._roster.ready()}
        if not loads:
            return
        for orphan in self._orphans.take_ready():
            generation = orphan.generation
            worker = self._placement.choose(loads, generation.prompt, generation.request.cache_salt)
            self._resubmit(self._roster.connection(worker), generation, orphan.answer)
            loads[worker] = self._roster.connection(worker).load

    def _resubmit(self, connection: WorkerConnection, generation: Generation, answer: Answer) -> None:
        request, suspicion = generation.request, answer.suspicion
        generation.was_resubmitted = True
        connection.add(generation, answer)
        self._homes[answer.key] = connection
        if suspicion is not None:
            suspicion.submitted()
        connection.send(
            Submit(
                answer.key,
                request.request_id,
                generation.prompt,
                answer.sampling(request.sampling, has_prompt_logprobs=generation.has_prompt_logprobs),
                request.max_tokens,
                priority=request.priority,
                cache_salt=request.cache_salt,
                time_left_s=_time_left(generation),
                output=answer.output(),
                is_resubmission=True,
                is_suspect=suspicion is not None and suspicion.is_suspect,
            )
        )


def _time_left(generation: Generation) -> float | None:
    if generation.deadline is None:
        return None
    return max(0.0, generation.deadline - asyncio.get_running_loop().time())
