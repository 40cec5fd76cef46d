"""Runs a scheduler on the strict simulated engine with a fake clock, and checks all that must always hold.

Shared by the scheduler's tests. The oracle for tokens is a plain loop over the simulated model's token
function: what the sequence would have got alone, uninterrupted, on an endless machine.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace

import numpy as np

from engine.interface import EngineCapacity, Sampling, StepHandle, StepPlan, TokenLogprobs
from engine.simulated import SimulatedEngine, SimulatedOptions
from engine.simulated.tokens import advance, choose, logprobs_at
from worker.messages import FinishReason, Rejected, StepTokens, Submit
from worker.scheduler import Scheduler, SchedulerObserver, SchedulerOptions
from worker.scheduling.line import WaitingLine
from worker.sequence import Sequence, State

VOCABULARY = 1000


class FakeClock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Oracle:
    """What one sequence must get, computed as far as asked."""

    def __init__(self, prompt: np.ndarray, sampling: Sampling, options: SimulatedOptions) -> None:
        self._sampling = sampling
        self._options = options
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self._state = 0
        for position, token in enumerate(prompt.tolist()):
            if position and sampling.prompt_logprobs is not None:
                self.prompt_logprobs.append(
                    logprobs_at(self._state, token, sampling.prompt_logprobs, options.vocab_size)
                )
            self._state = advance(self._state, token)

    def first(self, n: int) -> list[int]:
        """Its first n output tokens, were there no end."""
        ids = self._options.token_ids or range(self._options.vocab_size)
        while len(self.tokens) < n:
            index = len(self.tokens)
            token = choose(self._state, self._sampling, index, ids, self._options.stop_one_in)
            if self._sampling.logprobs is not None:
                self.logprobs.append(
                    logprobs_at(self._state, token, self._sampling.logprobs, self._options.vocab_size)
                )
            self.tokens.append(token)
            self._state = advance(self._state, token)
        return self.tokens[:n]


@dataclass
class Stream:
    """What a front has heard of one sequence, against what it should."""

    submit: Submit
    sampling: Sampling
    oracle: Oracle
    tokens: list[int] = field(default_factory=list)
    """Resubmitted ones first."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int | None = None
    finished: FinishReason | None = None
    fault: str = ""
    preemptions: int = 0
    is_silenced: bool = False
    was_aborted: bool = False
    was_paused: bool = False
    deadline: float | None = None


class Harness:
    """One scheduler, one engine, and everything that fronts have heard."""

    def __init__(
        self,
        engine: SimulatedOptions | None = None,
        observer: SchedulerObserver | None = None,
        **scheduler: object,
    ) -> None:
        self.engine_options = replace(engine or SimulatedOptions(), vocab_size=VOCABULARY)
        self.engine = SimulatedEngine(self.engine_options)
        self.clock = FakeClock()
        options = SchedulerOptions(**scheduler)  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.capacity, options, self.clock, observer)
        self.streams: dict[tuple[int, int], Stream] = {}
        self.plans: list[StepPlan] = []
        self.messages: list[dict[int, StepTokens]] = []
        self._handles: deque[StepHandle] = deque()
        self._next_key = 0
        self.n_stood_aside = 0
        self._stood_aside: set[Sequence] = set()
        self.scheduler._planner.line.park = self._park  # type: ignore[method-assign]

    @property
    def capacity(self) -> EngineCapacity:
        return self.engine.capacity

    # ---- what a front does

    def submit(
        self,
        prompt: int | list[int] | np.ndarray = 10,
        max_tokens: int = 5,
        *,
        front: int = 0,
        request_id: str | None = None,
        output: list[int] | None = None,
        **fields: object,
    ) -> int | Rejected:
        """Submits; the key of answer 0, or the refusal. A number makes a prompt like no other, so long."""
        key = self._next_key
        if isinstance(prompt, int):
            prompt = np.random.default_rng(1_000_003 + key).integers(0, VOCABULARY, prompt)
        sampling_fields = {
            name: fields.pop(name) for name in list(fields) if name in Sampling.__dataclass_fields__
        }
        sampling = Sampling(**sampling_fields)  # type: ignore[arg-type]
        submit = Submit(
            key=key,
            request_id=request_id or f"request-{front}-{key}",
            prompt=np.asarray(prompt, np.int32),
            sampling=sampling,
            max_tokens=max_tokens,
            output=None if output is None else np.array(output, np.int32),
            **fields,  # type: ignore[arg-type]
        )
        self._next_key += submit.n
        rejected = self.scheduler.submit(front, submit)
        if rejected is not None:
            assert rejected.key == key
            return rejected
        for answer in range(submit.n):
            own = replace(sampling, seed=(sampling.seed + answer) % 2**64)
            if answer:
                own = replace(own, prompt_logprobs=None)
            self.streams[front, key + answer] = Stream(
                submit,
                own,
                Oracle(submit.prompt, own, self.engine_options),
                tokens=list(output or []),
                deadline=None if submit.time_left_s is None else self.clock.now + submit.time_left_s,
            )
        return key

    def cancel(self, front: int, keys: list[int]) -> None:
        self.scheduler.cancel(front, keys)
        for key in keys:
            if (front, key) in self.streams:
                self.streams[front, key].is_silenced = True

    def abort(self, request_id: str) -> bool:
        for stream in self.streams.values():
            if stream.submit.request_id == request_id:
                stream.was_aborted = True
        return self.scheduler.abort(request_id)

    def pause(self, key: int, paused: bool = True, *, front: int = 0) -> None:
        self.streams[front, key].was_paused |= paused
        self.scheduler.set_paused(front, key, paused)

    def drop_front(self, front: int) -> None:
        self.scheduler.drop_front(front)
        for (owner, _), stream in self.streams.items():
            stream.is_silenced |= owner == front

    # ---- what the worker's loop does

    def plan(self) -> StepPlan | None:
        """One more step under way, if there can be."""
        before = self.never_started()
        self._stood_aside = {sequence for sequence in before if sequence.parked_on is not None}
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append(plan)
            for start in plan.starts:
                assert start.sampling.prompt_logprobs is None or not len(start.output), "asked for twice"
            self._handles.append(self.engine.execute(plan))
        self._check_starts(before)
        self.check()
        return plan

    def _park(self, sequence: Sequence, digest: bytes) -> None:
        self.n_stood_aside += 1
        self._stood_aside.add(sequence)
        WaitingLine.park(self.scheduler._planner.line, sequence, digest)

    def collect(self) -> None:
        """The oldest step's result."""
        self.scheduler.collect(self._handles.popleft().result())
        self.check()

    def take(self) -> dict[int, StepTokens]:
        """What fronts hear."""
        outputs = self.scheduler.take_outputs()
        if outputs:
            self.messages.append(outputs)
        for front, message in outputs.items():
            self._hear(front, message)
        return outputs

    def turn(self) -> bool:
        """One turn of the worker's loop; whether anything moved."""
        plan = self.plan()
        moved = plan is not None
        if self._handles and (plan is None or len(self._handles) == self.capacity.pipeline_depth):
            self.collect()
            moved = True
        self.take()
        return moved

    @property
    def steps_under_way(self) -> int:
        """Plans made whose results have not been collected."""
        return len(self.scheduler._under_way)

    @property
    def is_idle(self) -> bool:
        """Whether no sequence exists, not even a paused one, and no step is under way."""
        return not self.steps_under_way and len(self.scheduler._registry) == 0

    @property
    def has_work(self) -> bool:
        """Whether a sequence is running or in line (paused ones do not count) or a step is under way."""
        paused = self.scheduler.stats().paused
        return bool(self.steps_under_way) or len(self.scheduler._registry) > paused

    def run(self, max_turns: int = 20_000) -> None:
        """Until nothing moves."""
        for _ in range(max_turns):
            if not self.turn():
                assert not self.has_work, "there is work, but nothing moves"
                return
        raise AssertionError(f"still busy after {max_turns} turns")

    def collect_all(self) -> None:
        while self._handles:
            self.collect()
        self.take()

    # ---- what was heard

    def tokens(self, key: int, *, front: int = 0) -> list[int]:
        return self.streams[front, key].tokens

    def finished(self, key: int, *, front: int = 0) -> FinishReason | None:
        return self.streams[front, key].finished

    def state(self, key: int, *, front: int = 0) -> State | None:
        sequence = self.scheduler._registry.sequence(front, key)
        return None if sequence is None else sequence.state

    def _hear(self, front: int, message: StepTokens) -> None:
        assert len(set(message.keys)) == len(message.keys)
        assert len(message.keys) == len(message.counts)
        assert sum(message.counts) == len(message.tokens)
        for started in message.started:
            stream = self._listening(front, started.key)
            assert stream.cached_tokens is None, "started twice"
            assert 0 <= started.cached_tokens <= len(stream.submit.prompt)
            assert started.queue_s >= 0
            stream.cached_tokens = started.cached_tokens
        for key, logprobs in message.prompt_logprobs.items():
            stream = self._listening(front, key)
            assert stream.prompt_logprobs is None, "prompt log-probabilities came twice"
            assert logprobs == stream.oracle.prompt_logprobs
            stream.prompt_logprobs = logprobs
        at = 0
        for key, count in zip(message.keys, message.counts, strict=True):
            stream = self._listening(front, key)
            assert count > 0
            assert stream.cached_tokens is not None, "tokens before Started"
            stream.tokens += message.tokens[at : at + count]
            at += count
            assert stream.tokens == stream.oracle.first(len(stream.tokens)), f"sequence {key} goes wrong"
            assert len(stream.tokens) <= stream.submit.max_tokens
            if stream.sampling.logprobs is not None:
                stream.logprobs += message.logprobs[key]
                n_before = len(stream.tokens) - len(stream.logprobs)
                assert stream.logprobs == stream.oracle.logprobs[n_before:][: len(stream.logprobs)]
            if stream.sampling.prompt_logprobs is not None and stream.submit.output is None:
                assert stream.prompt_logprobs is not None, "tokens before the prompt's log-probabilities"
        for finished in message.finished:
            stream = self._listening(front, finished.key)
            stream.finished = finished.reason
            stream.fault = finished.message
            stream.preemptions = finished.preemptions
            self._check_reason(stream)

    def _listening(self, front: int, key: int) -> Stream:
        stream = self.streams[front, key]
        assert not stream.is_silenced, f"sequence {key} was cancelled, but there is news of it"
        assert stream.finished is None, f"sequence {key} is over, but there is news of it"
        return stream

    def _check_reason(self, stream: Stream) -> None:
        tokens, stops = stream.tokens, stream.sampling.stop_token_ids
        has_stopped = bool(tokens) and tokens[-1] in stops
        assert not any(token in stops for token in tokens[:-1])
        match stream.finished:
            case FinishReason.STOP_TOKEN:
                assert has_stopped
            case FinishReason.LENGTH:
                assert len(tokens) == stream.submit.max_tokens
                assert not has_stopped
            case FinishReason.ABORTED:
                assert stream.was_aborted
            case FinishReason.DEADLINE:
                assert stream.deadline is not None
                assert stream.deadline <= self.clock.now
            case FinishReason.FAULT:
                assert stream.fault
            case _:
                raise AssertionError(f"finished with {stream.finished}")
        if stream.finished not in (FinishReason.STOP_TOKEN, FinishReason.LENGTH):
            assert len(tokens) < stream.submit.max_tokens
            assert not has_stopped

    # ---- what must always hold

    def never_started(self) -> list[Sequence]:
        return [
            sequence
            for sequence in self.scheduler._registry.sequences()
            if sequence.state is State.WAITING and sequence.started_at is None
        ]

    def _check_starts(self, before: list[Sequence]) -> None:
        """Nobody has overtaken one of better rank, unless that one stands aside for a shared page."""
        started = [sequence.rank for sequence in before if sequence.started_at is not None]
        for sequence in before:
            if sequence.state is State.WAITING and sequence not in self._stood_aside and started:
                assert sequence.rank > max(started)

    def check(self) -> None:
        """Pages, slots and lists agree with one another, whatever has happened."""
        planner = self.scheduler._planner
        residents, pages, line = planner.residents, planner.pages, planner.line
        live = self.scheduler._registry.sequences()
        holding = [s for s in live if s.state in (State.PREFILLING, State.DECODING)]

        slots = [s.slot for s in holding]
        assert sorted(slots + residents._free_slots) == list(range(self.capacity.slots))
        assert residents.decoding == {s.slot: s for s in holding if s.state is State.DECODING}
        assert set(residents.decode_slots()) == set(residents.decoding)
        assert residents.prefilling == sorted(
            (s for s in holding if s.state is State.PREFILLING), key=lambda s: s.rank
        )

        references = Counter(page for s in holding for page in s.pages)
        assert all(pages.references(page) == references[page] for page in range(self.capacity.pages))
        assert all(len(set(s.pages)) == len(s.pages) for s in holding)
        assert all(s.room == len(s.pages) * 64 and s.n_computed <= s.room for s in holding)
        idle = pages._free + list(pages._cached)
        assert sorted(idle + list(references)) == list(range(self.capacity.pages))
        assert set(pages._cached) <= set(pages._digest_of)
        assert {page: digest for digest, page in pages._page_of.items()} == pages._digest_of

        waiting = [s for s in live if s.state is State.WAITING]
        assert len(line) == len(waiting)
        assert all(not s.pages and s.slot < 0 for s in live if s not in holding)
        promised = planner._prefixes._promised
        assert all(leader.state is State.PREFILLING for leader in promised.values())
        assert all(s.parked_on in promised for s in waiting if s.parked_on is not None)
        assert all(s.state is not State.FINISHED for s in live)

        stats = self.scheduler.stats()
        assert stats.running == len(holding)
        assert stats.waiting == len(waiting)
        assert stats.paused == sum(s.state is State.PAUSED for s in live)
        assert stats.pages_free + stats.pages_cached + len(references) == stats.pages

    def check_all_over(self) -> None:
        """Every sequence has ended exactly once (twice fails in _hear) and nothing is left behind."""
        for (_, key), stream in self.streams.items():
            assert (stream.finished is None) == stream.is_silenced or stream.finished, f"{key} has no end"
        assert self.is_idle
        assert not self.has_work
        assert self.scheduler.next_deadline() is None
        stats = self.scheduler.stats()
        assert stats.pages_free + stats.pages_cached == stats.pages
        assert (stats.running, stats.waiting, stats.paused) == (0, 0, 0)
        planner = self.scheduler._planner
        assert not planner._prefixes._promised
        assert not planner.line._parked
        assert not self.scheduler._registry._requests
        assert self.scheduler.take_outputs() == {}
