"""A minimal caller of an engine for tests: it owns the pages, writes plans and gathers tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from engine.interface import (
    PAGE_SIZE,
    Engine,
    PageAssignment,
    PrefillChunk,
    Sampling,
    SlotStart,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

GREEDY = Sampling(temperature=0.0)


class Driver:
    """Runs sequences to an end by plans it makes itself. Pages are handed out once and never taken back."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[int, list[int]] = defaultdict(list)
        """Sampled tokens by slot."""
        self.stopped: dict[int, bool] = defaultdict(bool)
        self.logprobs: dict[int, list[TokenLogprobs]] = defaultdict(list)
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = defaultdict(list)
        self.faults: dict[int, str] = {}
        self.pages: dict[int, list[int]] = {}
        self._prompts: dict[int, np.ndarray] = {}
        self._lengths: dict[int, int] = {}
        self._starts: list[SlotStart] = []
        self._free = list(range(engine.capacity.pages))
        self._step = 0

    def start(
        self,
        slot: int,
        prompt: Sequence[int],
        sampling: Sampling = GREEDY,
        *,
        output: Sequence[int] = (),
        shared: Sequence[int] = (),
    ) -> None:
        """A sequence takes the slot with its next plan; `shared` are full pages of its prefix."""
        self._starts.append(SlotStart(slot, sampling, np.array(prompt, np.int32), np.array(output, np.int32)))
        self._prompts[slot] = np.array([*prompt, *output], np.int32)
        self._lengths[slot] = len(shared) * PAGE_SIZE
        self.pages[slot] = list(shared)
        self.tokens[slot], self.stopped[slot] = [], False
        self.logprobs[slot], self.prompt_logprobs[slot] = [], []

    def prefill(self, *slots: int, chunk: int | None = None) -> None:
        """Runs the slots' prompts to their ends, side by side, `chunk` tokens of each in a step."""
        while waiting := [slot for slot in slots if self._lengths[slot] < len(self._prompts[slot])]:
            self.step(prefills=[(slot, chunk) for slot in waiting])

    def decode(self, steps: int, *slots: int) -> None:
        """So many tokens for the slots; none named: for all that have sampled one."""
        for _ in range(steps):
            self.step(decodes=slots or [slot for slot, tokens in self.tokens.items() if tokens])

    def step(
        self,
        prefills: Iterable[tuple[int, int | None]] = (),
        decodes: Iterable[int] = (),
        releases: Iterable[int] = (),
    ) -> StepResult:
        """One plan: chunks as (slot, most tokens), decode rows, slots to release before."""
        starts, self._starts = self._starts, []
        before = {slot: len(pages) for slot, pages in self.pages.items()}
        chunks = [self._chunk(slot, limit) for slot, limit in prefills]
        decodes = list(decodes)
        for slot in decodes:
            if not self.stopped[slot]:
                self._grow(slot, 1)
        assignments = []
        started = {start.slot for start in starts}
        for slot, pages in self.pages.items():
            first = 0 if slot in started else before[slot]
            assignments += [PageAssignment(slot, i, pages[i]) for i in range(first, len(pages))]
        plan = StepPlan(
            self._step, tuple(releases), tuple(starts), tuple(assignments), tuple(chunks), tuple(decodes)
        )
        self._step += 1
        result = self.engine.execute(plan).result()
        self._gather(result)
        return result

    def _chunk(self, slot: int, limit: int | None) -> PrefillChunk:
        start, prompt = self._lengths[slot], self._prompts[slot]
        end = len(prompt) if limit is None else min(len(prompt), start + limit)
        self._grow(slot, end - start)
        return PrefillChunk(slot, prompt[start:end], start, is_last=end == len(prompt))

    def _grow(self, slot: int, tokens: int) -> None:
        self._lengths[slot] += tokens
        while len(self.pages[slot]) * PAGE_SIZE < self._lengths[slot]:
            self.pages[slot].append(self._free.pop())

    def _gather(self, result: StepResult) -> None:
        for slot, token, stopped in zip(result.slots, result.tokens, result.stopped, strict=True):
            self.tokens[slot].append(token)
            self.stopped[slot] = stopped
        for slot, entry in result.logprobs.items():
            self.logprobs[slot].append(entry)
        for slot, entries in result.prompt_logprobs.items():
            self.prompt_logprobs[slot] += entries
        for slot, reason in result.faults.items():
            self.faults[slot] = reason
            self.stopped[slot] = True
