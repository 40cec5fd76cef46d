"""What the host knows of each slot: a plan is checked against it, then changes it. Touches no device.

Plans are enqueued before earlier steps' tokens are read, so the host cannot know of a stop that has just been
sampled: positions here count as if no sequence stopped. `ended` tells it later.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.interface import IntArray, Sampling, SlotStart, StepPlan, pages_for
from engine.plan_check import ANY_POSITION, NO_PAGE, PlanLimits, SlotPhase, check_plan


class Ledger:
    """All slots of an engine."""

    def __init__(self, limits: PlanLimits) -> None:
        slots = limits.capacity.slots
        self._limits = limits
        self._phase = np.zeros(slots, np.int8)
        self._position = np.full(slots, ANY_POSITION, np.int64)
        self._sampling: list[Sampling | None] = [None] * slots
        self._generation = np.zeros(slots, np.int64)
        self._greedy = np.zeros(slots, np.bool_)
        self._logprobs = np.zeros(slots, np.bool_)
        self.block_tables: IntArray = np.full(
            (slots, pages_for(limits.capacity.max_sequence_length)), NO_PAGE, np.int32
        )

    # ---- what a check asks

    def check(self, plan: StepPlan) -> None:
        """Raises ValueError that names the step, the slot and what is wrong; nothing has changed then."""
        check_plan(plan, self, self._limits)

    def phases(self, slots: NDArray[np.int64]) -> NDArray[np.int8]:
        """As SlotBook has it."""
        return self._phase[slots]

    def positions(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """As SlotBook has it."""
        return self._position[slots]

    def prompt_logprobs(self, slot: int) -> int | None:
        sampling = self._sampling[slot]
        return None if sampling is None else sampling.prompt_logprobs

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

    # ---- changes

    def apply(self, plan: StepPlan) -> None:
        """Takes a plan that check() has passed."""
        for slot in plan.releases:
            self._empty(slot)
        for start in plan.starts:
            self._start(start)
        for assignment in plan.pages:
            self.block_tables[assignment.slot, assignment.index] = assignment.page
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
        self.block_tables[slot] = NO_PAGE

    def _start(self, start: SlotStart) -> None:
        slot, sampling = start.slot, start.sampling
        self._empty(slot)
        self._phase[slot] = SlotPhase.PREFILL
        self._position[slot] = ANY_POSITION
        self._sampling[slot] = sampling
        self._greedy[slot] = sampling.temperature == 0.0
        self._logprobs[slot] = sampling.logprobs is not None
