"""Builds step plans: who decodes, who prefills how much, who starts, who must make room.

Knows no request ids, no fronts and no deadlines; only sequences in line and resident ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.interface import PAGE_SIZE, EngineCapacity, PageAssignment, PrefillChunk, SlotStart, StepPlan
from worker.pages import PageManager
from worker.scheduling.chunks import Chunk, ChunkBudget
from worker.scheduling.line import WaitingLine
from worker.scheduling.options import SchedulerOptions
from worker.scheduling.prefixes import PrefixSharing
from worker.scheduling.residents import Residents
from worker.sequence import Sequence, State


@dataclass(slots=True)
class StepUnderWay:
    """A planned step whose result is to come."""

    step: int
    rows: dict[int, Sequence]
    """By slot, all that take part."""
    prefilled: dict[int, Sequence]
    """Those of them that ran a chunk."""


@dataclass(slots=True)
class PlannerCounts:
    """Since the start; see SchedulerStats."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0


@dataclass(slots=True)
class _Draft:
    """What goes into the plan in the making."""

    starts: list[SlotStart] = field(default_factory=list)
    pages: list[PageAssignment] = field(default_factory=list)


class StepPlanner:
    """Owns slots, pages and the waiting line, and moves sequences between them."""

    def __init__(
        self, capacity: EngineCapacity, options: SchedulerOptions, on_first_start: Callable[[Sequence], None]
    ) -> None:
        """`on_first_start` is told of each sequence whose first chunk is in a plan.

        Raises ValueError if a step has no room for a token of each slot.
        """
        if capacity.max_step_tokens < capacity.slots:
            raise ValueError(
                f"max_step_tokens is {capacity.max_step_tokens}, but {capacity.slots} slots need as many to "
                "decode in one step"
            )
        self.line = WaitingLine()
        self.pages = PageManager(capacity.pages)
        self._prefixes = PrefixSharing(
            self.pages,
            enabled=options.prefix_caching and capacity.prefix_cacheable,
            on_settled=self.line.unpark,
        )
        self.residents = Residents(capacity, self.pages, self._prefixes)
        self.last_step = -1
        self.last_collected = -1
        """To be kept up to date by whoever collects results."""
        self.counts = PlannerCounts()
        self._on_first_start = on_first_start
        self._budget = capacity.max_step_tokens
        self._prefill_limit = (
            options.prefill_tokens_beside_decodes or capacity.prefill_tokens_beside_decodes or self._budget
        )
        self._takes_turns = options.prefill_policy == "alternating"
        self._is_prefills_turn = True
        self._blocked: tuple[Sequence, int] | None = None

    def plan(self) -> tuple[StepPlan, StepUnderWay] | None:
        """The next step, or None if nothing can run. Raises no error of its own."""
        draft = _Draft()
        chunks: list[Chunk] = []
        decodes: tuple[int, ...] = ()
        if self._takes_turns and (self._is_prefills_turn or not self.residents.decoding):
            chunks = self._share_budget(self._budget, draft)
        if not chunks:
            self._make_room_for_decodes(draft)
            decodes = self.residents.decode_slots()
            if not self._takes_turns:
                limit = min(self._budget - len(decodes), self._prefill_limit if decodes else self._budget)
                chunks = self._share_budget(limit, draft)
        if not chunks and not decodes:
            return None
        self._is_prefills_turn = bool(decodes)
        return self._issue(draft, chunks, decodes)

    def give_up(self, sequence: Sequence, *, is_sound: bool = True) -> None:
        """Takes from the sequence whatever it has or waits for; its next state is the caller's to set.

        Of one that is not sound, no page that it computed will be shared any more.
        """
        if not is_sound:
            self._prefixes.disown(sequence)
        if sequence.state is State.WAITING:
            self.line.leave(sequence)
        elif sequence.state is State.PREFILLING or sequence.state is State.DECODING:
            self.residents.leave(sequence, keep_prefix=is_sound)
            sequence.ready_after = self.last_step

    # ---- decode rows

    def _make_room_for_decodes(self, draft: _Draft) -> None:
        """A page for every decoding sequence that has filled its last one, preempting where it must.

        The best-ranked take first, and the worst-ranked resident gives way. So whoever has got a page
        in this plan keeps it, and the best-ranked always goes forward, which rules out livelock.
        """
        short = [
            sequence for sequence in self.residents.decoding.values() if sequence.n_computed == sequence.room
        ]
        if not short:
            return
        short.sort(key=lambda sequence: sequence.rank)
        for sequence in short:
            while sequence.state is State.DECODING and self.pages.n_available == 0:
                self._preempt(self.residents.worst())
            if sequence.state is State.DECODING:
                draft.pages.append(self.residents.grow(sequence))

    def _preempt(self, sequence: Sequence) -> None:
        self.give_up(sequence)
        sequence.preemptions += 1
        self.counts.preemptions += 1
        self.line.join(sequence)

    # ---- prefill chunks

    def _share_budget(self, tokens: int, draft: _Draft) -> list[Chunk]:
        """Chunks of resident prompts and of newcomers, merged by rank."""
        residents = self.residents.prefilling.copy()
        if tokens <= 0 or not (residents or len(self.line)):
            return []
        budget = ChunkBudget(tokens)
        position = 0
        newcomer = self._next_newcomer()
        while budget.left > 0 and (position < len(residents) or newcomer is not None):
            if newcomer is None or (
                position < len(residents) and residents[position].rank < newcomer[0].rank
            ):
                sequence = residents[position]
                position += 1
                length = budget.offer(sequence.n_computed, len(sequence.tokens), sequence.request.priority)
                if length:
                    budget.take(sequence, length)
            elif self._admit(*newcomer, budget, draft):
                newcomer = self._next_newcomer()
            else:
                newcomer = None
        budget.top_up()
        return budget.chunks

    def _next_newcomer(self) -> tuple[Sequence, list[int]] | None:
        """The head of the line with the cached pages it can share, if there are a slot and pages for it.

        Nobody passes a head that has to wait for pages, or long prompts would wait for ever. (So one that
        was pushed out just now keeps those behind it from the pages it gave, and cannot return itself.)
        """
        if self.residents.n_free_slots == 0:
            return None
        while (sequence := self.line.head()) is not None:
            if sequence.ready_after > self.last_collected:
                return None
            if self._blocked == (sequence, self.pages.n_releases):
                return None
            found = self._prefixes.find(sequence)
            promised = self._prefixes.promise_worth_waiting_for(sequence, len(found))
            if promised is not None:
                self.line.park(sequence, promised)
            elif self.residents.has_pages_for(sequence, found):
                return sequence, found
            else:
                self._blocked = (sequence, self.pages.n_releases)
                return None
        return None

    def _admit(self, sequence: Sequence, found: list[int], budget: ChunkBudget, draft: _Draft) -> bool:
        """Starts the head of the line if the budget has a chunk for it."""
        cached = len(found) * PAGE_SIZE
        length = budget.offer(cached, sequence.n_known, sequence.request.priority)
        if length == 0:
            return False
        self.line.leave(sequence)
        start, pages = self.residents.start(sequence, found)
        draft.starts.append(start)
        draft.pages.extend(pages)
        budget.take(sequence, length)
        if sequence.started_at is None:
            self._note_first_start(sequence, cached)
        return True

    def _note_first_start(self, sequence: Sequence, cached: int) -> None:
        n_prompt = len(sequence.request.prompt)
        sequence.cached_tokens = min(cached, n_prompt)
        self.counts.prompt_tokens += n_prompt
        if self._prefixes.may_share(sequence):
            self.counts.prefix_queries += n_prompt
            self.counts.prefix_hits += sequence.cached_tokens
        self._on_first_start(sequence)

    # ---- the plan itself

    def _issue(
        self, draft: _Draft, chunks: list[Chunk], decodes: tuple[int, ...]
    ) -> tuple[StepPlan, StepUnderWay]:
        self.last_step += 1
        rows = self.residents.lend_decoding() if decodes else {}
        prefilled = {chunk.sequence.slot: chunk.sequence for chunk in chunks}
        if prefilled:
            rows = rows | prefilled
        plan = StepPlan(
            step=self.last_step,
            releases=tuple(self.residents.releases),
            starts=tuple(draft.starts),
            pages=tuple(draft.pages),
            prefills=tuple([_prefill(chunk) for chunk in chunks]),
            decodes=decodes,
        )
        self.residents.releases.clear()
        if decodes:
            self._advance_decodes()
        for chunk in chunks:
            self._advance_prefill(chunk)
        return plan, StepUnderWay(plan.step, rows, prefilled)

    def _advance_decodes(self) -> None:
        last_ones = []
        for sequence in self.residents.decoding.values():
            sequence.n_computed += 1
            sequence.n_planned += 1
            if sequence.n_planned == sequence.max_tokens:
                last_ones.append(sequence)
        for sequence in last_ones:
            self._end(sequence)

    def _advance_prefill(self, chunk: Chunk) -> None:
        """Only now may later steps share the chunk's pages: within one step nothing orders the chunks."""
        sequence = chunk.sequence
        sequence.n_computed += chunk.length
        self.counts.prefill_tokens += chunk.length
        self._prefixes.publish(sequence, sequence.n_computed)
        if sequence.n_computed == len(sequence.tokens):
            sequence.n_planned += 1
            self.residents.begin_decoding(sequence)
            if sequence.n_planned == sequence.max_tokens:
                self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """The last token is in this step. Slot and pages are free for the next one: steps run in order."""
        self.residents.leave(sequence)
        sequence.state = State.ENDING


def _prefill(chunk: Chunk) -> PrefillChunk:
    sequence = chunk.sequence
    start, end = sequence.n_computed, sequence.n_computed + chunk.length
    return PrefillChunk(sequence.slot, sequence.tokens[start:end], start, end == len(sequence.tokens))
