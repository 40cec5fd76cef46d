"""What the engine remembers of each slot between steps, and the block tables. Computes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.interface import SlotStart, pages_for
from engine.plan_check import ANY_POSITION, NO_PAGE, SlotPhase
from engine.reference.arrays import FloatArray, IntArray
from engine.reference.sampler import Sampler


@dataclass(slots=True)
class Sequence:
    """The state of an occupied slot, apart from KV and recurrent state."""

    sampler: Sampler
    position: int | None = None
    """Tokens whose KV is in place, so the next token's position; None before the first chunk."""
    last_token: int | None = None
    """The last sampled token, which a decode row feeds; None while in prefill."""
    inert: bool = False
    """It has stopped or failed: rows of it do nothing until the slot is started anew."""
    last_hidden: FloatArray | None = field(default=None, repr=False)
    """Final hidden state [hidden] of the last prefilled row, kept where prompt log-probabilities are due."""

    @property
    def phase(self) -> SlotPhase:
        if self.inert:
            return SlotPhase.ENDED
        return SlotPhase.PREFILL if self.last_token is None else SlotPhase.DECODE


class Slots:
    """All slots of an engine."""

    def __init__(self, count: int, max_sequence_length: int, vocab_size: int) -> None:
        self.sequences: list[Sequence | None] = [None] * count
        self.block_tables: IntArray = np.full((count, pages_for(max_sequence_length)), NO_PAGE, np.int32)
        """int32 [slots, pages of the longest sequence]; NO_PAGE where nothing is assigned."""
        self._vocab_size = vocab_size

    def start(self, start: SlotStart) -> None:
        """A new or resumed sequence takes the slot; all of the old one's state goes."""
        self.release(start.slot)
        sampler = Sampler(start.sampling, start.prompt, start.output, self._vocab_size)
        self.sequences[start.slot] = Sequence(sampler)

    def release(self, slot: int) -> None:
        """Empties the slot. An empty one stays so."""
        self.sequences[slot] = None
        self.block_tables[slot] = NO_PAGE

    def occupied(self, slot: int) -> Sequence:
        """The sequence in a slot that the plan check has found occupied."""
        sequence = self.sequences[slot]
        assert sequence is not None
        return sequence

    def phases(self, slots: NDArray[np.int64]) -> NDArray[np.int8]:
        """As SlotBook has it."""
        sequences = [self.sequences[slot] for slot in slots]
        return np.array([SlotPhase.EMPTY if each is None else each.phase for each in sequences], np.int8)

    def positions(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """As SlotBook has it."""
        known = (None if each is None else each.position for each in map(self.sequences.__getitem__, slots))
        return np.array([ANY_POSITION if position is None else position for position in known], np.int64)

    def prompt_logprobs(self, slot: int) -> int | None:
        """As SlotBook has it."""
        return self.occupied(slot).sampler.sampling.prompt_logprobs

    def pages_of(self, slot: int) -> IntArray:
        """Numbers of all pages the slot has."""
        table = self.block_tables[slot]
        pages: IntArray = table[table != NO_PAGE]
        return pages
