"""Keeps account of what every KV page holds, and refuses plans that would read or write the wrong one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from engine.interface import PAGE_SIZE, EngineCapacity, PageAssignment, PrefillChunk, SlotStart, StepPlan
from engine.simulated.tokens import advance

EMPTY = -1
SPOILT = -2


@dataclass(slots=True)
class Account:
    """One occupied slot."""

    tokens: list[int]
    """Prompt and output, sampled tokens included."""
    states: list[int]
    """By position: stands for all tokens up to it. What the KV there must have been made from."""
    n_given: int
    """Tokens known at its start."""
    table: list[int]
    n_computed: int | None = None
    """Positions with KV; None before its first chunk."""
    n_cached: int = 0
    """Positions with KV that others have computed."""
    is_inert: bool = False
    """It has stopped or failed."""


class Ledger:
    """Checks plans in the order they are executed; every breach raises ValueError.

    What the KV of a position holds is told by one number, which stands for all tokens up to that
    position; so a page of another sequence, an outdated page, or the right tokens at a wrong place
    differ from what a row expects to read.
    """

    def __init__(self, capacity: EngineCapacity, vocab_size: int) -> None:
        self._capacity = capacity
        self._vocab_size = vocab_size
        self._next_step: int | None = None
        self._accounts: dict[int, Account] = {}
        self._users: Counter[int] = Counter()
        self._contents = [[EMPTY] * PAGE_SIZE for _ in range(capacity.pages)]

    def account(self, slot: int) -> Account:
        """Of an occupied slot."""
        account = self._accounts.get(slot)
        _require(account is not None, f"slot {slot} is not occupied")
        assert account is not None
        return account

    def check(self, plan: StepPlan) -> dict[int, str]:
        """Books a plan; returns slots that read KV which a failed sequence has spoilt, with a text."""
        _require(
            self._next_step in (None, plan.step), f"step {plan.step} comes where {self._next_step} should"
        )
        self._next_step = plan.step + 1
        for slot in plan.releases:
            self._release(slot)
        for start in plan.starts:
            self._start(start)
        for assignment in plan.pages:
            self._assign(assignment)
        self._check_budget(plan)
        # Nothing orders the rows of one step, so all read what was there before it.
        spoilt = {}
        for chunk in plan.prefills:
            self._check_chunk(chunk)
        for slot in plan.decodes:
            self._check_decode(slot)
        for slot in (*(chunk.slot for chunk in plan.prefills), *plan.decodes):
            if not self._reads_right(slot):
                spoilt[slot] = f"slot {slot} reads KV that a failed sequence has spoilt"
        for chunk in plan.prefills:
            self._write(chunk.slot, chunk.start, len(chunk.tokens))
        for slot in plan.decodes:
            if not self.account(slot).is_inert:
                self._write(slot, len(self.account(slot).tokens) - 1, 1)
        return spoilt

    def sampled(self, slot: int, token: int, *, stopped: bool) -> None:
        """A row has produced a token."""
        account = self.account(slot)
        account.tokens.append(token)
        account.states.append(advance(account.states[-1], token))
        account.is_inert = stopped

    def failed(self, slot: int) -> None:
        """What the sequence has written itself is worthless."""
        account = self.account(slot)
        account.is_inert = True
        for page in account.table[account.n_cached // PAGE_SIZE :]:
            self._contents[page] = [SPOILT] * PAGE_SIZE

    def _release(self, slot: int) -> None:
        account = self.account(slot)
        self._users.subtract(account.table)
        del self._accounts[slot]

    def _start(self, start: SlotStart) -> None:
        _require(0 <= start.slot < self._capacity.slots, f"slot {start.slot} does not exist")
        _require(start.slot not in self._accounts, f"slot {start.slot} is occupied")
        _require(len(start.prompt) > 0, f"slot {start.slot} starts with an empty prompt")
        tokens = [int(token) for token in (*start.prompt, *start.output)]
        _require(
            all(0 <= token < self._vocab_size for token in tokens),
            f"slot {start.slot} starts with tokens outside the vocabulary",
        )
        states: list[int] = []
        state = 0
        for token in tokens:
            state = advance(state, token)
            states.append(state)
        self._accounts[start.slot] = Account(tokens, states, len(tokens), [])

    def _assign(self, assignment: PageAssignment) -> None:
        slot, page = assignment.slot, assignment.page
        table = self.account(slot).table
        _require(
            assignment.index == len(table), f"slot {slot} gets page {assignment.index} of its table next"
        )
        _require(0 <= page < self._capacity.pages, f"page {page} does not exist")
        _require(page not in table, f"slot {slot} gets page {page} twice")
        table.append(page)
        self._users[page] += 1

    def _check_budget(self, plan: StepPlan) -> None:
        tokens = sum(len(chunk.tokens) for chunk in plan.prefills) + len(plan.decodes)
        _require(0 < tokens <= self._capacity.max_step_tokens, f"the plan has {tokens} tokens")
        slots = [chunk.slot for chunk in plan.prefills] + list(plan.decodes)
        _require(len(set(slots)) == len(slots), "a slot has two rows in one plan")

    def _check_chunk(self, chunk: PrefillChunk) -> None:
        account = self.account(chunk.slot)
        end = chunk.start + len(chunk.tokens)
        _require(
            account.n_computed in (None, chunk.start),
            f"slot {chunk.slot} has {account.n_computed} positions computed, a chunk starts at {chunk.start}",
        )
        _require(chunk.start < end <= account.n_given, f"slot {chunk.slot}: chunk {chunk.start} … {end}")
        _require(
            bool(np.array_equal(chunk.tokens, account.tokens[chunk.start : end])),
            f"slot {chunk.slot} gets other tokens than those it started with",
        )
        _require(chunk.is_last == (end == account.n_given), f"slot {chunk.slot}: is_last is wrong")
        if account.n_computed is None:
            account.n_computed = account.n_cached = chunk.start

    def _check_decode(self, slot: int) -> None:
        account = self.account(slot)
        _require(
            account.n_computed is not None and account.n_computed >= account.n_given,
            f"slot {slot} decodes, but its prefill is not over",
        )
        _require(
            account.is_inert or account.n_computed == len(account.tokens) - 1,
            f"slot {slot} decodes, but an earlier row of its has given no token",
        )
        _require(
            len(account.tokens) < self._capacity.max_sequence_length or account.is_inert,
            f"slot {slot} decodes beyond the longest sequence",
        )

    def _reads_right(self, slot: int) -> bool:
        account = self.account(slot)
        if account.is_inert:
            return True
        assert account.n_computed is not None
        for start in range(0, account.n_computed, PAGE_SIZE):
            n = min(PAGE_SIZE, account.n_computed - start)
            held = self._contents[account.table[start // PAGE_SIZE]][:n]
            if held == account.states[start : start + n]:
                continue
            if SPOILT in held:
                return False
            raise ValueError(
                f"slot {slot}: page {account.table[start // PAGE_SIZE]} does not hold "
                f"positions {start} … {start + n - 1} of its sequence"
            )
        return True

    def _write(self, slot: int, start: int, n: int) -> None:
        account = self.account(slot)
        for position in range(start, start + n):
            index = position // PAGE_SIZE
            _require(index < len(account.table), f"slot {slot} has no page for position {position}")
            page = account.table[index]
            _require(self._users[page] == 1, f"slot {slot} writes to page {page}, which others use too")
            self._contents[page][position % PAGE_SIZE] = account.states[position]
        account.n_computed = start + n


def _require(holds: bool, breach: str) -> None:
    if not holds:
        raise ValueError(f"the plan breaks the contract: {breach}")
