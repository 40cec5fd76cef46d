"""The simulated engine: keeps every promise of the interface, and computes nothing.

With validation every plan is checked to the last position (see ledger); without, a decode row costs
well under half a microsecond, so that whatever else is measured shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.interface import (
    Engine,
    EngineError,
    EngineInfo,
    PrefillChunk,
    Progress,
    SlotStart,
    StepHandle,
    StepPlan,
    StepResult,
    pages_for,
)
from engine.options import EngineOptions, StepSizes
from engine.simulated.ledger import Ledger
from engine.simulated.options import SimulatedOptions
from engine.simulated.tokens import (
    INDEX_FACTOR,
    MASK,
    MIXER,
    MULTIPLIER,
    SEED_FACTOR,
    advance,
    advance_all,
    choose,
    logprobs_at,
)
from engine.simulated.vocabulary import read_vocabulary

SUITED_SIZES = StepSizes(max_sequences=64, max_step_tokens=2048)
"""A load test is not to wait for slots; prompts cost it next to nothing, so they need no bound."""
_PIPELINE_DEPTH = 2


class _Slot:
    """What a slot needs to go on generating."""

    __slots__ = ("index", "is_inert", "is_plain", "sampling", "seed", "start", "state", "stops")

    def __init__(self, start: SlotStart, stop_one_in: int) -> None:
        self.start = start
        self.sampling = start.sampling
        self.stops = start.sampling.stop_token_ids
        self.seed = start.sampling.seed * SEED_FACTOR
        self.index = len(start.output)
        self.state = advance_all(advance_all(0, start.prompt), start.output)
        self.is_inert = False
        self.is_plain = not (
            start.sampling.min_tokens or start.sampling.logprobs is not None or (stop_one_in and self.stops)
        )
        """Whether the short way of choosing a token gives the same as choose()."""


class _Handle(StepHandle):
    def __init__(self, engine: SimulatedEngine, result: StepResult, done_at: float) -> None:
        self._engine = engine
        self._result = result
        self._done_at = done_at

    def is_done(self) -> bool:
        return self._done_at <= self._engine.clock()

    def result(self) -> StepResult:
        self._engine.wait_until(self._done_at)
        self._engine.steps_under_way -= 1
        return self._result


class SimulatedEngine(Engine):
    """See the module."""

    def __init__(
        self,
        options: SimulatedOptions,
        *,
        architecture: str = "simulated",
        notes: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`clock` and `sleep`, in seconds, stand for the passing of time where a step takes any."""
        self.capacity = options.capacity()
        self.info = EngineInfo(
            engine="simulated",
            architecture=architecture,
            device="none",
            weight_dtype="none",
            kv_dtype="none",
            parameters=0,
            layers=0,
            hidden_size=0,
            vocab_size=options.vocab_size,
            fallbacks=notes,
        )
        self.clock = clock
        self.steps_under_way = 0
        self._sleep = sleep
        self._options = options
        self._token_ids: tuple[int, ...] | range = options.token_ids or range(options.vocab_size)
        self._slots: dict[int, _Slot] = {}
        self._ledger = Ledger(self.capacity, options.vocab_size) if options.validate else None
        self._busy_until = 0.0
        self._is_closed = False

    @classmethod
    def load(cls, options: EngineOptions, progress: Progress) -> SimulatedEngine:
        """One with the model's vocabulary, that generates ordinary words, without validation.

        Raises ModelError if the model's vocabulary cannot be read.
        """
        progress("reading the vocabulary", 0.0)
        vocabulary = read_vocabulary(options.model)
        length = options.max_sequence_length or vocabulary.max_sequence_length
        sizes = options.sizes(SUITED_SIZES)
        engine = cls(
            SimulatedOptions(
                slots=sizes.max_sequences,
                pages=options.kv_pages or sizes.max_sequences * pages_for(length),
                max_sequence_length=length,
                max_step_tokens=sizes.max_step_tokens,
                pipeline_depth=_PIPELINE_DEPTH,
                vocab_size=vocabulary.size,
                token_ids=vocabulary.ordinary_ids,
                step_s=options.simulated_step_us * 1e-6,
                validate=False,
            ),
            architecture=vocabulary.architecture,
            notes=vocabulary.notes,
        )
        progress("ready", 1.0)
        return engine

    def execute(self, plan: StepPlan) -> StepHandle:
        """See Engine. The result is there at once, unless steps take time."""
        if self._is_closed:
            raise EngineError("the engine is closed")
        if self._options.validate and self.steps_under_way >= self.capacity.pipeline_depth:
            raise ValueError(f"{self.steps_under_way} steps are under way already")
        spoilt = self._ledger.check(plan) if self._ledger else {}
        for slot in plan.releases:
            self._slots.pop(slot, None)
        for start in plan.starts:
            self._slots[start.slot] = _Slot(start, self._options.stop_one_in)
        result = StepResult([], [], [])
        self._find_faults(plan, spoilt, result)
        for chunk in plan.prefills:
            self._prefill(chunk, result)
        self._decode(plan.decodes, result)
        if self._ledger:
            for slot, token, stopped in zip(result.slots, result.tokens, result.stopped, strict=True):
                self._ledger.sampled(slot, token, stopped=stopped)
            for slot in result.faults:
                self._ledger.failed(slot)
        self.steps_under_way += 1
        return _Handle(self, result, self._take_time())

    def close(self) -> None:
        """See Engine."""
        self._is_closed = True
        self._slots.clear()

    def wait_until(self, when: float) -> None:
        """Lets time pass."""
        if when and (left := when - self.clock()) > 0:
            self._sleep(left)

    def _take_time(self) -> float:
        if not self._options.step_s:
            return 0.0
        self._busy_until = max(self._busy_until, self.clock()) + self._options.step_s
        return self._busy_until

    def _prefill(self, chunk: PrefillChunk, result: StepResult) -> None:
        slot = self._slots[chunk.slot]
        if slot.is_inert:
            return
        alternatives = slot.sampling.prompt_logprobs
        if alternatives is not None:
            state = advance_all(0, slot.start.prompt[: chunk.start])
            logprobs = []
            for position, token in enumerate(chunk.tokens.tolist(), chunk.start):
                if position:
                    logprobs.append(logprobs_at(state, token, alternatives, self._options.vocab_size))
                state = advance(state, token)
            result.prompt_logprobs[chunk.slot] = logprobs
        if chunk.is_last:
            self._sample(chunk.slot, slot, result)

    def _decode(self, slots: tuple[int, ...], result: StepResult) -> None:
        """The short way is choose(), written out: a call per row would triple what a row costs."""
        token_ids = self._token_ids
        n_ids = len(token_ids)
        rows, tokens, stopped = result.slots, result.tokens, result.stopped
        for number in slots:
            slot = self._slots[number]
            if slot.is_inert:
                continue
            if not slot.is_plain:
                self._sample(number, slot, result)
                continue
            state = slot.state
            mixed = (state ^ (slot.seed + slot.index * INDEX_FACTOR)) & MASK
            token = token_ids[(((mixed ^ mixed >> 32) * MIXER & MASK) >> 32) % n_ids]
            slot.index += 1
            slot.state = (state * MULTIPLIER + token + 1) & MASK
            rows.append(number)
            tokens.append(token)
            if token in slot.stops:
                slot.is_inert = True
                stopped.append(True)
            else:
                stopped.append(False)

    def _sample(self, number: int, slot: _Slot, result: StepResult) -> None:
        sampling = slot.sampling
        token = choose(slot.state, sampling, slot.index, self._token_ids, self._options.stop_one_in)
        if sampling.logprobs is not None:
            result.logprobs[number] = logprobs_at(
                slot.state, token, sampling.logprobs, self._options.vocab_size
            )
        slot.index += 1
        slot.state = advance(slot.state, token)
        slot.is_inert = token in slot.stops
        result.slots.append(number)
        result.tokens.append(token)
        result.stopped.append(slot.is_inert)

    def _find_faults(self, plan: StepPlan, spoilt: dict[int, str], result: StepResult) -> None:
        options = self._options
        result.faults.update(spoilt)
        for chunk in plan.prefills:
            if options.break_token is not None and options.break_token in chunk.tokens:
                raise EngineError(f"token {options.break_token} breaks the simulated engine")
            if options.fault_token is not None and options.fault_token in chunk.tokens:
                result.faults[chunk.slot] = f"token {options.fault_token} fails"
        if options.fault is not None:
            for slot in (*(chunk.slot for chunk in plan.prefills), *plan.decodes):
                text = None if self._slots[slot].is_inert else options.fault(plan.step, slot)
                if text is not None:
                    result.faults[slot] = text
        for slot in result.faults:
            self._slots[slot].is_inert = True
