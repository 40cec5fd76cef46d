"""Whether a step plan keeps the contract, decided before anything is changed. Knows no device and no weights.

An engine shows what it holds of its slots as a SlotBook. Decode rows are checked all at once: they come every
step, for every stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.interface import (
    MAX_LOGPROBS,
    PAGE_SIZE,
    EngineCapacity,
    IntArray,
    PageAssignment,
    PrefillChunk,
    SlotStart,
    StepPlan,
    pages_for,
)

NO_PAGE = -1
"""A block table's entry where no page has been assigned."""
ANY_POSITION = -1
"""Of a sequence before its first chunk: it may start behind a cached prefix."""


class SlotPhase(IntEnum):
    """What a slot's sequence may do next."""

    EMPTY = 0
    PREFILL = 1
    DECODE = 2
    ENDED = 3
    """Stopped or failed; its rows do nothing."""


class SlotBook(Protocol):
    """An engine's knowledge of its slots. Slot numbers given are within its capacity."""

    @property
    def block_tables(self) -> IntArray:
        """int32 [slots, pages of the longest sequence]; NO_PAGE where nothing is assigned."""

    def phases(self, slots: NDArray[np.int64]) -> NDArray[np.int8]:
        """SlotPhase of each."""

    def positions(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of each one's next token to be fed, or ANY_POSITION."""

    def prompt_logprobs(self, slot: int) -> int | None:
        """As the slot's sequence has asked for."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What a plan may name and ask for."""

    capacity: EngineCapacity
    vocab_size: int
    stop_token_ids: int | None = None
    """Most of one sequence; None: any number."""
    logit_biases: int | None = None
    """Most of one sequence; None: any number."""


def check_plan(plan: StepPlan, book: SlotBook, limits: PlanLimits) -> None:
    """Raises ValueError that names the step, the slot and what is wrong with it."""
    try:
        _PlanCheck(plan, book, limits).run()
    except ValueError as error:
        raise ValueError(f"step {plan.step}: {error}") from None


class _PlanCheck:
    """One plan against the state it would meet; keeps its own view of what the plan changes."""

    def __init__(self, plan: StepPlan, book: SlotBook, limits: PlanLimits) -> None:
        self._plan = plan
        self._book = book
        self._limits = limits
        self._capacity = limits.capacity
        self._starts = {start.slot: start for start in plan.starts}
        self._gone = set(plan.releases) - self._starts.keys()
        self._tables: dict[int, IntArray] = {}
        """Block tables of the slots that the plan changes, as it leaves them."""

    def run(self) -> None:
        plan = self._plan
        self._budget()
        _distinct(plan.releases, "is released twice")
        _distinct((start.slot for start in plan.starts), "is started twice")
        _distinct((*(chunk.slot for chunk in plan.prefills), *plan.decodes), "stands in two rows")
        for slot in plan.releases:
            self._in_range(slot)
        for start in plan.starts:
            self._start(start)
        for assignment in plan.pages:
            self._page(assignment)
        for chunk in plan.prefills:
            self._prefill(chunk)
        if plan.decodes:
            self._decodes(plan.decodes)

    def _budget(self) -> None:
        rows = sum(len(chunk.tokens) for chunk in self._plan.prefills) + len(self._plan.decodes)
        most = self._capacity.max_step_tokens
        _demand(rows <= most, f"{rows} rows exceed the step's {most}")

    def _start(self, start: SlotStart) -> None:
        self._in_range(start.slot)
        sampling, where = start.sampling, f"slot {start.slot}"
        self._tokens(start.prompt, f"{where}: prompt")
        self._tokens(start.output, f"{where}: output")
        for token in sampling.logit_bias:
            if not 0 <= token < self._limits.vocab_size:
                raise ValueError(f"{where}: logit_bias names token {token}, not in the vocabulary")
        for given, most, what in (
            (sampling.logit_bias, self._limits.logit_biases, "biases"),
            (sampling.stop_token_ids, self._limits.stop_token_ids, "stop_token_ids"),
        ):
            _demand(most is None or len(given) <= most, f"{where}: more than {most} {what}")
        for count, what in (
            (sampling.logprobs, "logprobs"),
            (sampling.prompt_logprobs, "prompt_logprobs"),
        ):
            in_range = count is None or 0 <= count <= MAX_LOGPROBS
            _demand(in_range, f"{where}: {what} is not in 0 … {MAX_LOGPROBS}")

    def _tokens(self, tokens: IntArray, what: str) -> None:
        is_vector = tokens.ndim == 1 and (len(tokens) == 0 or np.issubdtype(tokens.dtype, np.integer))
        _demand(is_vector, f"{what} is not a vector of integers")
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self._limits.vocab_size):
            raise ValueError(f"{what} holds a token that is not in 0 … {self._limits.vocab_size - 1}")

    def _page(self, assignment: PageAssignment) -> None:
        slot, index, page = assignment.slot, assignment.index, assignment.page
        self._occupied(slot)
        if slot not in self._tables:
            self._tables[slot] = self._table(slot).copy()
        table = self._tables[slot]
        if not 0 <= index < len(table):
            raise ValueError(f"slot {slot}: block table entry {index} is not in 0 … {len(table) - 1}")
        if not 0 <= page < self._capacity.pages:
            raise ValueError(f"slot {slot}: page {page} is not in 0 … {self._capacity.pages - 1}")
        table[index] = page

    def _prefill(self, chunk: PrefillChunk) -> None:
        slot, where = chunk.slot, f"slot {chunk.slot}"
        self._occupied(slot)
        _demand(len(chunk.tokens) > 0, f"{where}: the chunk is empty")
        self._tokens(chunk.tokens, f"{where}: the chunk")
        phase, position = self._state(slot)
        if phase is SlotPhase.ENDED:
            return
        _demand(phase is SlotPhase.PREFILL, f"{where}: its prefill is over, it can only decode")
        if position == ANY_POSITION:
            _demand(chunk.start >= 0, f"{where}: the chunk starts at {chunk.start}")
            _demand(
                chunk.start == 0 or self._prompt_logprobs(slot) is None,
                f"{where}: prompt log-probabilities need the prompt from position 0, not from {chunk.start}",
            )
        elif chunk.start != position:
            raise ValueError(f"{where}: the chunk starts at {chunk.start}, the sequence is at {position}")
        end = chunk.start + len(chunk.tokens)
        self._length(slot, end)
        missing = np.flatnonzero(self._table(slot)[: pages_for(end)] == NO_PAGE)
        if len(missing):
            raise ValueError(f"{where}: block table entry {missing[0]} has no page")

    def _decodes(self, decodes: tuple[int, ...]) -> None:
        slots = np.array(decodes, np.int64)
        for slot in slots[(slots < 0) | (slots >= self._capacity.slots)].tolist():
            self._in_range(slot)
        phases = self._book.phases(slots)
        waiting = slots[(phases != SlotPhase.DECODE) & (phases != SlotPhase.ENDED)].tolist()
        changed = [slot for slot in decodes if slot in self._starts or slot in self._gone]
        for slot in (*waiting, *changed):
            self._occupied(slot)
            raise ValueError(f"slot {slot}: it cannot decode before its last chunk has run")
        running = slots[phases == SlotPhase.DECODE]
        positions = self._book.positions(running)
        for slot in running[positions >= self._capacity.max_sequence_length].tolist():
            self._length(slot, self._capacity.max_sequence_length + 1)
        entries = positions // PAGE_SIZE
        lacking = self._book.block_tables[running, entries] == NO_PAGE
        for slot, entry in zip(running[lacking].tolist(), entries[lacking].tolist(), strict=True):
            if self._table(slot)[entry] == NO_PAGE:
                raise ValueError(f"slot {slot}: block table entry {entry} has no page")

    # ---- the slots as the plan leaves them

    def _state(self, slot: int) -> tuple[SlotPhase, int]:
        if slot in self._starts:
            return SlotPhase.PREFILL, ANY_POSITION
        one = np.array([slot])
        return SlotPhase(self._book.phases(one)[0]), int(self._book.positions(one)[0])

    def _prompt_logprobs(self, slot: int) -> int | None:
        start = self._starts.get(slot)
        return self._book.prompt_logprobs(slot) if start is None else start.sampling.prompt_logprobs

    def _table(self, slot: int) -> IntArray:
        if slot in self._tables:
            return self._tables[slot]
        table = self._book.block_tables[slot]
        return np.full_like(table, NO_PAGE) if slot in self._starts else table

    def _occupied(self, slot: int) -> None:
        self._in_range(slot)
        there = slot not in self._gone and self._state(slot)[0] is not SlotPhase.EMPTY
        _demand(there, f"slot {slot}: no sequence has been started in it")

    def _in_range(self, slot: int) -> None:
        if not 0 <= slot < self._capacity.slots:
            raise ValueError(f"slot {slot} is not in 0 … {self._capacity.slots - 1}")

    def _length(self, slot: int, tokens: int) -> None:
        longest = self._capacity.max_sequence_length
        _demand(tokens <= longest, f"slot {slot}: {tokens} tokens exceed the longest sequence, {longest}")


def _demand(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _distinct(slots: Iterable[int], what: str) -> None:
    seen: set[int] = set()
    for slot in slots:
        _demand(slot not in seen, f"slot {slot} {what}")
        seen.add(slot)
