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

from collections import Counter, deque
from collections.abc import Callable, Iterable

from engine.interface import EngineCapacity, StepPlan, StepResult
from worker.messages import Finished, FinishReason, Rejected, RejectReason, Started, StepTokens, Submit
from worker.scheduling.aborts import AbortMemory
from worker.scheduling.admission import Admission
from worker.scheduling.options import SchedulerOptions
from worker.scheduling.planner import StepPlanner, StepUnderWay
from worker.scheduling.registry import Registry
from worker.scheduling.stats import SchedulerObserver, SchedulerStats
from worker.sequence import Request, Sequence, State

__all__ = ["Scheduler", "SchedulerObserver", "SchedulerOptions", "SchedulerStats"]

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
        self._capacity = capacity
        self._clock = clock
        self._observer = observer
        self._registry = Registry(AbortMemory(options.abort_memory_size, options.abort_memory_s))
        self._admission = Admission(capacity, options, self._registry)
        self._planner = StepPlanner(capacity, options, self._note_first_start)
        self._under_way: deque[StepUnderWay] = deque()
        self._untold_steps = 0
        self._n_paused = 0
        self._n_generated = 0
        self._finished: Counter[FinishReason] = Counter()
        self._rejected: Counter[RejectReason] = Counter()

    # ---- from the fronts

    def submit(self, front: int, message: Submit) -> Rejected | None:
        """Queues a request's sequences; None if admitted, else the message to send back.

        A draining scheduler still takes resubmissions: their clients already have part of an answer.
        Raises ValueError if the message breaks its own contract (empty prompt, max_tokens < 1, …).
        """
        now = self._clock()
        line, free_slots = self._planner.line, self._planner.residents.n_free_slots
        rejected = self._admission.refusal(front, message, waiting=len(line), free_slots=free_slots, now=now)
        if rejected is not None:
            self._rejected[rejected.reason] += 1
            return rejected
        request = self._admission.make_request(self._registry.front(front), message, now)
        self._registry.add(request)
        for sequence in request.live.copy():
            line.join(sequence)
            self._end_if_complete(sequence)
        return None

    def cancel(self, front: int, keys: Iterable[int]) -> None:
        """Ends sequences in silence; keys that are not (or no longer) there are ignored."""
        news = self._registry.fronts.get(front)
        if news is None:
            return
        for key in keys:
            news.silence(key)
            sequence = news.sequences.get(key)
            if sequence is not None:
                self._finish(sequence, FinishReason.CANCELLED)

    def abort(self, request_id: str) -> bool:
        """Ends all answers of a request; False if it is unknown, which is then remembered for a while."""
        requests = self._registry.requests(request_id)
        if not requests:
            self._registry.aborts.add(request_id, self._clock())
            return False
        for request in requests.copy():
            self._finish_request(request, FinishReason.ABORTED)
        return True

    def set_paused(self, front: int, key: int, paused: bool) -> None:
        """Parks a sequence without slot and pages, or puts it back in line; unknown keys are ignored.

        One whose last token is in a step already has nothing to give back and goes on to its end.
        """
        sequence = self._registry.sequence(front, key)
        if sequence is None or sequence.state is State.ENDING or paused == (sequence.state is State.PAUSED):
            return
        if paused:
            self._planner.give_up(sequence)
            sequence.state = State.PAUSED
            self._n_paused += 1
        else:
            self._n_paused -= 1
            self._planner.line.join(sequence)

    def drop_front(self, front: int) -> None:
        """A front is gone: ends its sequences in silence and forgets what it had coming."""
        news = self._registry.fronts.get(front)
        if news is not None:
            for sequence in list(news.sequences.values()):
                self._finish(sequence, FinishReason.CANCELLED)
            del self._registry.fronts[front]

    def begin_drain(self) -> None:
        """From now on new requests are rejected; what is queued or running goes on to its end."""
        self._admission.is_draining = True

    def finish_all(self, reason: FinishReason, message: str = "") -> None:
        """Ends every sequence now, with tokens collected so far and a Finished each."""
        for sequence in self._registry.sequences():
            self._finish(sequence, reason, message)

    # ---- to and from the engine

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run now (no work, or pipeline_depth steps under way).

        Also ends what has passed its deadline, so call it when next_deadline() comes even if idle. A
        plan counts as under way at once: every plan must be executed, and its result collected.
        """
        self._end_overdue()
        if len(self._under_way) >= self._capacity.pipeline_depth:
            return None
        planned = self._planner.plan()
        if planned is None:
            return None
        plan, under_way = planned
        self._under_way.append(under_way)
        return plan

    def collect(self, result: StepResult) -> int:
        """Takes the result of the oldest step under way; the number of tokens it gave to sequences."""
        under_way = self._under_way.popleft()
        self._planner.last_collected = under_way.step
        self._untold_steps += 1
        rows = under_way.rows
        if result.logprobs or result.prompt_logprobs or under_way.prefilled:
            self._collect_logprobs(result, under_way)
        over: list[tuple[Sequence, FinishReason]] = []
        n_unwanted = 0
        for slot, token, stopped in zip(result.slots, result.tokens, result.stopped, strict=True):
            sequence = rows[slot]
            if sequence.state is State.FINISHED:
                n_unwanted += 1
                continue
            output = sequence.output
            output.append(token)
            news = sequence.news
            news.keys.append(sequence.key)
            news.tokens.append(token)
            if stopped:
                over.append((sequence, FinishReason.STOP_TOKEN))
            elif len(output) == sequence.max_tokens:
                over.append((sequence, FinishReason.LENGTH))
        n_tokens = len(result.tokens) - n_unwanted
        self._n_generated += n_tokens
        if under_way.prefilled:
            self._note_first_tokens(under_way, result.slots)
        for sequence, reason in over:
            self._finish(sequence, reason)
        for slot, fault in result.faults.items():
            self._finish(rows[slot], FinishReason.FAULT, fault)
        return n_tokens

    def take_outputs(self) -> dict[int, StepTokens]:
        """By front, all that is new since the last call; each key at most once in `keys`.

        Fronts with no news are not in it.
        """
        merge = self._untold_steps > 1
        self._untold_steps = 0
        outputs = {}
        for front, news in self._registry.fronts.items():
            message = news.take(merge=merge)
            if message is not None:
                outputs[front] = message
        return outputs

    # ---- what is going on

    def next_deadline(self) -> float | None:
        """When the next sequence's time is up, by the clock; None if no sequence has a deadline."""
        return self._registry.next_deadline()

    def stats(self) -> SchedulerStats:
        """Counts for status and metrics."""
        planner = self._planner
        return SchedulerStats(
            running=len(planner.residents),
            waiting=len(planner.line),
            paused=self._n_paused,
            slots=self._capacity.slots,
            pages=self._capacity.pages,
            pages_free=planner.pages.n_free,
            pages_cached=planner.pages.n_cached,
            is_draining=self._admission.is_draining,
            steps=planner.last_step + 1,
            preemptions=planner.counts.preemptions,
            prefix_queries=planner.counts.prefix_queries,
            prefix_hits=planner.counts.prefix_hits,
            prompt_tokens=planner.counts.prompt_tokens,
            prefill_tokens=planner.counts.prefill_tokens,
            generated_tokens=self._n_generated,
            finished=dict(self._finished),
            rejected=dict(self._rejected),
        )

    # ---- ends

    def _end_overdue(self) -> None:
        if self._registry.next_deadline() is None:
            return
        now = self._clock()
        while (request := self._registry.overdue(now)) is not None:
            self._finish_request(request, FinishReason.DEADLINE)

    def _end_if_complete(self, sequence: Sequence) -> None:
        """A resubmission may lack nothing but the word that it is over."""
        output = sequence.output
        if output and output[-1] in sequence.sampling.stop_token_ids:
            self._finish(sequence, FinishReason.STOP_TOKEN)
        elif len(output) >= sequence.max_tokens:
            self._finish(sequence, FinishReason.LENGTH)

    def _finish_request(self, request: Request, reason: FinishReason) -> None:
        for sequence in request.live.copy():
            self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason, message: str = "") -> None:
        """The one way out, whatever state it is in."""
        if sequence.state is State.FINISHED:
            return
        self._planner.give_up(sequence, is_sound=reason is not FinishReason.FAULT)
        if sequence.state is State.PAUSED:
            self._n_paused -= 1
        sequence.state = State.FINISHED
        self._registry.remove(sequence)
        self._finished[reason] += 1
        sequence.news.finished.append(Finished(sequence.key, reason, message, sequence.preemptions))
        if sequence.started_at is not None:
            self._admission.note_run(self._clock() - sequence.started_at)

    # ---- what a sequence goes through once

    def _note_first_start(self, sequence: Sequence) -> None:
        sequence.started_at = self._clock()
        queue_s = sequence.started_at - sequence.request.submitted_at
        sequence.news.started.append(Started(sequence.key, sequence.cached_tokens, queue_s))
        if self._observer is not None:
            self._observer.started(queue_s)

    def _note_first_tokens(self, under_way: StepUnderWay, sampled: list[int]) -> None:
        slots = set(sampled)
        for slot, sequence in under_way.prefilled.items():
            if slot in slots and not sequence.has_spoken and sequence.state is not State.FINISHED:
                sequence.has_spoken = True
                if self._observer is not None:
                    self._observer.first_token()

    def _collect_logprobs(self, result: StepResult, under_way: StepUnderWay) -> None:
        for slot, logprobs in result.logprobs.items():
            sequence = under_way.rows[slot]
            if sequence.state is not State.FINISHED:
                sequence.news.logprobs.setdefault(sequence.key, []).append(logprobs)
        for slot, sequence in under_way.prefilled.items():
            gathered = sequence.prompt_logprobs
            if gathered is None or sequence.state is State.FINISHED:
                continue
            gathered.extend(result.prompt_logprobs.get(slot, ()))
            if len(gathered) == len(sequence.request.prompt) - 1:
                sequence.news.prompt_logprobs[sequence.key] = gathered
                sequence.prompt_logprobs = None
