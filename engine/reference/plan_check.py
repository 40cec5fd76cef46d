"""Whether a step plan keeps the contract, decided before anything is changed. Computes nothing."""

from __future__ import annotations

import numpy as np

from engine.interface import (
    MAX_LOGPROBS,
    EngineCapacity,
    PageAssignment,
    PrefillChunk,
    SlotStart,
    StepPlan,
    pages_for,
)
from engine.reference.arrays import IntArray
from engine.reference.slots import NO_PAGE, Slots


def check_plan(plan: StepPlan, slots: Slots, capacity: EngineCapacity, vocab_size: int) -> None:
    """Raises ValueError that names the step, the slot and what is wrong with it."""
    try:
        _PlanCheck(plan, slots, capacity, vocab_size).run()
    except ValueError as error:
        raise ValueError(f"step {plan.step}: {error}") from None


class _PlanCheck:
    """One plan against the state it would meet; keeps its own view of what the plan changes."""

    def __init__(self, plan: StepPlan, slots: Slots, capacity: EngineCapacity, vocab_size: int) -> None:
        self._plan = plan
        self._slots = slots
        self._capacity = capacity
        self._vocab_size = vocab_size
        self._emptied = set(plan.releases)
        self._starts = {start.slot: start for start in plan.starts}
        self._tables: dict[int, IntArray] = {}

    def run(self) -> None:
        plan = self._plan
        self._budget()
        _distinct(list(plan.releases), "is released twice")
        _distinct([start.slot for start in plan.starts], "is started twice")
        _distinct([*(chunk.slot for chunk in plan.prefills), *plan.decodes], "stands in two rows")
        for slot in plan.releases:
            self._in_range(slot)
        for start in plan.starts:
            self._start(start)
        for assignment in plan.pages:
            self._page(assignment)
        for chunk in plan.prefills:
            self._prefill(chunk)
        for slot in plan.decodes:
            self._decode(slot)

    def _budget(self) -> None:
        plan = self._plan
        rows = sum(len(chunk.tokens) for chunk in plan.prefills) + len(plan.decodes)
        _demand(
            rows <= self._capacity.max_step_tokens,
            f"{rows} rows exceed the step's {self._capacity.max_step_tokens}",
        )

    def _in_range(self, slot: int) -> None:
        _demand(0 <= slot < self._capacity.slots, f"slot {slot} is not in 0 … {self._capacity.slots - 1}")

    def _start(self, start: SlotStart) -> None:
        self._in_range(start.slot)
        where = f"slot {start.slot}"
        for what, tokens in (("prompt", start.prompt), ("output", start.output)):
            self._tokens(tokens, f"{where}: {what}")
        for token in start.sampling.logit_bias:
            _demand(
                0 <= token < self._vocab_size,
                f"{where}: logit_bias names token {token}, not in the vocabulary",
            )
        for what, count in (
            ("logprobs", start.sampling.logprobs),
            ("prompt_logprobs", start.sampling.prompt_logprobs),
        ):
            _demand(
                count is None or 0 <= count <= MAX_LOGPROBS, f"{where}: {what} is not in 0 … {MAX_LOGPROBS}"
            )

    def _tokens(self, tokens: IntArray, what: str) -> None:
        _demand(
            tokens.ndim == 1 and (len(tokens) == 0 or np.issubdtype(tokens.dtype, np.integer)),
            f"{what} is not a vector of integers",
        )
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self._vocab_size):
            raise ValueError(f"{what} holds a token that is not in 0 … {self._vocab_size - 1}")

    def _page(self, assignment: PageAssignment) -> None:
        slot, index, page = assignment.slot, assignment.index, assignment.page
        self._in_range(slot)
        self._occupied(slot)
        table = self._table(slot)
        _demand(
            0 <= index < len(table), f"slot {slot}: block table entry {index} is not in 0 … {len(table) - 1}"
        )
        _demand(
            0 <= page < self._capacity.pages,
            f"slot {slot}: page {page} is not in 0 … {self._capacity.pages - 1}",
        )
        table[index] = page

    def _prefill(self, chunk: PrefillChunk) -> None:
        slot, start = chunk.slot, chunk.start
        self._in_range(slot)
        self._occupied(slot)
        where = f"slot {slot}"
        _demand(len(chunk.tokens) > 0, f"{where}: the chunk is empty")
        self._tokens(chunk.tokens, f"{where}: the chunk")
        if slot in self._starts:
            position, ready, inert = None, False, False
            wants_prompt = self._starts[slot].sampling.prompt_logprobs is not None
        else:
            sequence = self._slots.occupied(slot)
            position, ready, inert = sequence.position, sequence.last_token is not None, sequence.inert
            wants_prompt = sequence.sampler.sampling.prompt_logprobs is not None
        if inert:
            return
        _demand(not ready, f"{where}: its prefill is over, it can only decode")
        if position is None:
            _demand(start >= 0, f"{where}: the chunk starts at {start}")
            _demand(
                start == 0 or not wants_prompt,
                f"{where}: prompt log-probabilities need the prompt from position 0, not from {start}",
            )
        else:
            _demand(start == position, f"{where}: the chunk starts at {start}, the sequence is at {position}")
        self._reach(slot, start + len(chunk.tokens))

    def _decode(self, slot: int) -> None:
        self._in_range(slot)
        self._occupied(slot)
        if slot in self._starts:
            raise ValueError(f"slot {slot}: it cannot decode before its last chunk has run")
        sequence = self._slots.occupied(slot)
        if sequence.inert:
            return
        if sequence.last_token is None or sequence.position is None:
            raise ValueError(f"slot {slot}: it cannot decode before its last chunk has run")
        self._reach(slot, sequence.position + 1)

    def _reach(self, slot: int, length: int) -> None:
        """The slot's sequence may be, and has pages for, so many tokens."""
        longest = self._capacity.max_sequence_length
        _demand(length <= longest, f"slot {slot}: {length} tokens exceed the longest sequence, {longest}")
        entries = self._table(slot)[: pages_for(length)]
        missing = np.flatnonzero(entries == NO_PAGE)
        _demand(len(missing) == 0, f"slot {slot}: block table entry {missing[:1]} has no page")

    def _occupied(self, slot: int) -> None:
        there = slot in self._starts or (
            slot not in self._emptied and self._slots.sequences[slot] is not None
        )
        _demand(there, f"slot {slot}: no sequence has been started in it")

    def _table(self, slot: int) -> IntArray:
        """The slot's block table as the plan leaves it."""
        if slot not in self._tables:
            table = self._slots.block_tables[slot]
            fresh = slot in self._starts or slot in self._emptied
            self._tables[slot] = np.full_like(table, NO_PAGE) if fresh else table.copy()
        return self._tables[slot]


def _demand(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _distinct(slots: list[int], what: str) -> None:
    seen: set[int] = set()
    for slot in slots:
        _demand(slot not in seen, f"slot {slot} {what}")
        seen.add(slot)
