"""What the host knows of each slot, and whether a plan keeps the contract. Touches no device.

Plans are enqueued before earlier steps' tokens are read, so the host cannot know of a stop that has just been
sampled: positions here count as if no sequence stopped. `ended` tells it later.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from engine.interface import (
    MAX_LOGPROBS,
    PAGE_SIZE,
    EngineCapacity,
    IntArray,
    PrefillChunk,
    Sampling,
    SlotStart,
    StepPlan,
)

NO_PAGE = -1
_ANY_POSITION = -1
"""Before the first chunk: a sequence may start behind a cached prefix."""
_MAX_BIASES = 1024


class SlotPhase(IntEnum):
    EMPTY = 0
    PREFILL = 1
    DECODE = 2
    ENDED = 3
    """Stopped or failed; its rows do nothing."""


class Ledger:
    """All slots of an engine."""

    def __init__(self, capacity: EngineCapacity, vocab_size: int, max_stop_ids: int) -> None:
        slots = capacity.slots
        self._capacity = capacity
        self._vocab_size = vocab_size
        self._max_stop_ids = max_stop_ids
        self._phase = np.zeros(slots, np.int8)
        self._position = np.full(slots, _ANY_POSITION, np.int64)
        self._sampling: list[Sampling | None] = [None] * slots
        self._generation = np.zeros(slots, np.int64)
        self._greedy = np.zeros(slots, np.bool_)
        self._logprobs = np.zeros(slots, np.bool_)
        self._pages = np.full((slots, -(-capacity.max_sequence_length // PAGE_SIZE)), NO_PAGE, np.int32)

    # ---- what execute asks

    def generation(self, slot: int) -> int:
        """Differs between the sequences of a slot."""
        return int(self._generation[slot])

    def has_ended(self, slot: int) -> bool:
        return bool(self._phase[slot] == SlotPhase.ENDED)

    def live(self, slots: tuple[int, ...]) -> list[int]:
        """Those that are not known to have ended."""
        phases = self._phase[list(slots)]
        return [slot for slot, phase in zip(slots, phases, strict=True) if phase != SlotPhase.ENDED]

    def all_greedy(self, slots: list[int]) -> bool:
        return bool(self._greedy[slots].all())

    def any_logprobs(self, slots: list[int]) -> bool:
        return bool(self._logprobs[slots].any())

    def prompt_logprobs(self, slot: int) -> int | None:
        sampling = self._sampling[slot]
        return None if sampling is None else sampling.prompt_logprobs

    def position(self, slot: int) -> int:
        """Of the next token to be fed."""
        return int(self._position[slot])

    # ---- changes

    def apply(self, plan: StepPlan) -> None:
        """Takes a plan that check() has passed."""
        for slot in plan.releases:
            self._empty(slot)
        for start in plan.starts:
            self._start(start)
        for assignment in plan.pages:
            self._pages[assignment.slot, assignment.index] = assignment.page
        for chunk in plan.prefills:
            if self._phase[chunk.slot] == SlotPhase.PREFILL:
                self._position[chunk.slot] = chunk.start + len(chunk.tokens)
                if chunk.is_last:
                    self._phase[chunk.slot] = SlotPhase.DECODE
        self._position[list(plan.decodes)] += 1

    def ended(self, slot: int, generation: int) -> None:
        """A sequence has stopped or failed, as a result told; nothing if the slot has another one since."""
        if self._generation[slot] == generation and self._phase[slot] != SlotPhase.EMPTY:
            self._phase[slot] = SlotPhase.ENDED

    def _empty(self, slot: int) -> None:
        self._phase[slot] = SlotPhase.EMPTY
        self._generation[slot] += 1
        self._sampling[slot] = None
        self._pages[slot] = NO_PAGE

    def _start(self, start: SlotStart) -> None:
        slot, sampling = start.slot, start.sampling
        self._empty(slot)
        self._phase[slot] = SlotPhase.PREFILL
        self._position[slot] = _ANY_POSITION
        self._sampling[slot] = sampling
        self._greedy[slot] = sampling.temperature == 0.0
        self._logprobs[slot] = sampling.logprobs is not None

    # ---- the contract

    def check(self, plan: StepPlan) -> None:
        """Raises ValueError that names the step, the slot and what is wrong; nothing has changed then."""
        try:
            self._check(plan)
        except ValueError as error:
            raise ValueError(f"step {plan.step}: {error}") from None

    def _check(self, plan: StepPlan) -> None:
        rows = sum(len(chunk.tokens) for chunk in plan.prefills) + len(plan.decodes)
        _demand(
            rows <= self._capacity.max_step_tokens,
            f"{rows} rows exceed the step's {self._capacity.max_step_tokens}",
        )
        _distinct(plan.releases, "is released twice")
        _distinct((start.slot for start in plan.starts), "is started twice")
        _distinct((*(chunk.slot for chunk in plan.prefills), *plan.decodes), "stands in two rows")
        for slot in plan.releases:
            self._in_range(slot)
        for start in plan.starts:
            self._check_start(start)
        starts = {start.slot: start for start in plan.starts}
        gone = set(plan.releases) - set(starts)
        tables = self._tables_after(plan, starts, gone)
        for chunk in plan.prefills:
            self._check_chunk(chunk, starts.get(chunk.slot), gone, tables)
        if plan.decodes:
            self._check_decodes(plan.decodes, starts, gone, tables)

    def _check_start(self, start: SlotStart) -> None:
        self._in_range(start.slot)
        sampling, where = start.sampling, f"slot {start.slot}"
        self._tokens(start.prompt, f"{where}: prompt")
        self._tokens(start.output, f"{where}: output")
        for token in sampling.logit_bias:
            if not 0 <= token < self._vocab_size:
                raise ValueError(f"{where}: logit_bias names token {token}, not in the vocabulary")
        _demand(len(sampling.logit_bias) <= _MAX_BIASES, f"{where}: more than {_MAX_BIASES} biases")
        _demand(
            len(sampling.stop_token_ids) <= self._max_stop_ids,
            f"{where}: more than {self._max_stop_ids} stop_token_ids",
        )
        for what in ("logprobs", "prompt_logprobs"):
            count = getattr(sampling, what)
            _demand(
                count is None or 0 <= count <= MAX_LOGPROBS, f"{where}: {what} is not in 0 … {MAX_LOGPROBS}"
            )

    def _tables_after(
        self, plan: StepPlan, starts: dict[int, SlotStart], gone: set[int]
    ) -> dict[int, IntArray]:
        """Block tables of the slots whose pages the plan changes, as it leaves them."""
        tables = {slot: np.full_like(self._pages[slot], NO_PAGE) for slot in starts}
        for assignment in plan.pages:
            slot, index, page = assignment.slot, assignment.index, assignment.page
            self._occupied(slot, starts, gone)
            table = tables.setdefault(slot, self._pages[slot].copy()) if slot not in tables else tables[slot]
            if not 0 <= index < len(table):
                raise ValueError(f"slot {slot}: block table entry {index} is not in 0 … {len(table) - 1}")
            if not 0 <= page < self._capacity.pages:
                raise ValueError(f"slot {slot}: page {page} is not in 0 … {self._capacity.pages - 1}")
            table[index] = page
        return tables

    def _check_chunk(
        self, chunk: PrefillChunk, start: SlotStart | None, gone: set[int], tables: dict[int, IntArray]
    ) -> None:
        slot, where = chunk.slot, f"slot {chunk.slot}"
        self._occupied(slot, {slot: start} if start else {}, gone)
        _demand(len(chunk.tokens) > 0, f"{where}: the chunk is empty")
        self._tokens(chunk.tokens, f"{where}: the chunk")
        phase = SlotPhase.PREFILL if start else SlotPhase(self._phase[slot])
        if phase is SlotPhase.ENDED:
            return
        _demand(phase is SlotPhase.PREFILL, f"{where}: its prefill is over, it can only decode")
        position = _ANY_POSITION if start else self.position(slot)
        if position == _ANY_POSITION:
            asked = start.sampling.prompt_logprobs if start else self.prompt_logprobs(slot)
            _demand(chunk.start >= 0, f"{where}: the chunk starts at {chunk.start}")
            _demand(
                chunk.start == 0 or asked is None,
                f"{where}: prompt log-probabilities need the prompt from position 0, not from {chunk.start}",
            )
        elif chunk.start != position:
            raise ValueError(f"{where}: the chunk starts at {chunk.start}, the sequence is at {position}")
        end = chunk.start + len(chunk.tokens)
        _demand(end <= self._capacity.max_sequence_length, f"{where}: {end} tokens are too many")
        table = tables.get(slot, self._pages[slot])
        missing = np.flatnonzero(table[: -(-end // PAGE_SIZE)] == NO_PAGE)
        if len(missing):
            raise ValueError(f"{where}: block table entry {missing[0]} has no page")

    def _check_decodes(
        self,
        decodes: tuple[int, ...],
        starts: dict[int, SlotStart],
        gone: set[int],
        tables: dict[int, IntArray],
    ) -> None:
        """All rows at once: this runs every step, for every stream."""
        slots = np.array(decodes, np.int64)
        if slots.min() < 0 or slots.max() >= self._capacity.slots:
            raise ValueError(f"a decode row's slot is not in 0 … {self._capacity.slots - 1}")
        phases = self._phase[slots]
        for slot in slots[(phases != SlotPhase.DECODE) & (phases != SlotPhase.ENDED)].tolist():
            self._occupied(slot, starts, gone)
            raise ValueError(f"slot {slot}: it cannot decode before its last chunk has run")
        for slot in decodes:
            if slot in starts or slot in gone:
                raise ValueError(f"slot {slot}: its sequence has just been replaced or released")
        running = slots[phases == SlotPhase.DECODE]
        positions = self._position[running]
        for slot in running[positions >= self._capacity.max_sequence_length].tolist():
            raise ValueError(f"slot {slot}: the sequence is as long as it may be")
        entries = positions // PAGE_SIZE
        lacking = self._pages[running, entries] == NO_PAGE
        for slot, entry in zip(running[lacking].tolist(), entries[lacking].tolist(), strict=True):
            if slot not in tables or tables[slot][entry] == NO_PAGE:
                raise ValueError(f"slot {slot}: block table entry {entry} has no page")

    def _occupied(self, slot: int, starts: dict[int, SlotStart], gone: set[int]) -> None:
        self._in_range(slot)
        there = slot in starts or (slot not in gone and self._phase[slot] != SlotPhase.EMPTY)
        _demand(there, f"slot {slot}: no sequence has been started in it")

    def _in_range(self, slot: int) -> None:
        if not 0 <= slot < self._capacity.slots:
            raise ValueError(f"slot {slot} is not in 0 … {self._capacity.slots - 1}")

    def _tokens(self, tokens: NDArray[np.int32], what: str) -> None:
        _demand(
            tokens.ndim == 1 and (len(tokens) == 0 or np.issubdtype(tokens.dtype, np.integer)),
            f"{what} is not a vector of integers",
        )
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self._vocab_size):
            raise ValueError(f"{what} holds a token that is not in 0 … {self._vocab_size - 1}")


def _demand(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _distinct(slots: Iterable[int], what: str) -> None:
    seen: set[int] = set()
    for slot in slots:
        _demand(slot not in seen, f"slot {slot} {what}")
        seen.add(slot)
