"""One step, from a checked plan to its result: slots, then one forward pass, then sampling.

Knows no weights and no request.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np

from engine.interface import PrefillChunk, StepPlan, StepResult, TokenLogprobs
from engine.reference.arrays import FloatArray
from engine.reference.batch import RaggedBatch, Segment, make_batch
from engine.reference.model import ReferenceModel
from engine.reference.ops.logprobs import token_logprobs
from engine.reference.slots import Sequence, Slots

_PROMPT_LOGITS_ROWS = 64
"""Rows of a prompt whose logits are held at once for its log-probabilities."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A segment of the pass and what is due after it."""

    segment: Segment
    sequence: Sequence
    samples: bool


class Step:
    """The carrying out of one plan."""

    def __init__(self, plan: StepPlan, model: ReferenceModel, slots: Slots) -> None:
        self._plan = plan
        self._model = model
        self._slots = slots
        self._result = StepResult(slots=[], tokens=[], stopped=[])

    def run(self) -> StepResult:
        self._update_slots()
        rows = [*map(self._prefill_row, self._plan.prefills), *map(self._decode_row, self._plan.decodes)]
        live = [row for row in rows if row is not None]
        if live:
            self._compute(live)
        return self._result

    def _update_slots(self) -> None:
        for slot in self._plan.releases:
            self._slots.release(slot)
        for start in self._plan.starts:
            self._slots.start(start)
            self._model.forget(start.slot)
        for assignment in self._plan.pages:
            self._slots.block_tables[assignment.slot, assignment.index] = assignment.page

    def _prefill_row(self, chunk: PrefillChunk) -> _Row | None:
        sequence = self._slots.occupied(chunk.slot)
        if sequence.inert:
            return None
        segment = Segment(chunk.slot, chunk.start, chunk.tokens)
        return _Row(segment, sequence, samples=chunk.is_last)

    def _decode_row(self, slot: int) -> _Row | None:
        sequence = self._slots.occupied(slot)
        if sequence.inert:
            return None
        assert sequence.position is not None
        token = np.array([sequence.last_token], np.int32)
        segment = Segment(slot, sequence.position, token, is_decode=True)
        return _Row(segment, sequence, samples=True)

    def _compute(self, rows: list[_Row]) -> None:
        began = perf_counter()
        segments = [row.segment for row in rows]
        batch = make_batch(segments, self._slots.block_tables, self._model.rows)
        hidden = self._model.forward(batch)
        ended = perf_counter()
        self._result.stage_us["forward"] = (ended - began) * 1e6
        healthy = [
            (row, chunk)
            for row, chunk in zip(rows, _split(hidden, batch), strict=True)
            if self._advance(row, chunk)
        ]
        for row, chunk in healthy:
            if not row.segment.is_decode and row.sequence.sampler.sampling.prompt_logprobs is not None:
                self._prompt_logprobs(row, chunk)
        self._sample([(row, chunk[-1]) for row, chunk in healthy if row.samples])
        self._result.stage_us["sample"] = (perf_counter() - ended) * 1e6

    def _advance(self, row: _Row, hidden: FloatArray) -> bool:
        """Moves the sequence's position; false, and the sequence fails, if its rows are not finite."""
        row.sequence.position = row.segment.start + len(row.segment.tokens)
        if np.isfinite(hidden).all():
            return True
        self._fail(row, "the model's activations are not finite")
        return False

    def _fail(self, row: _Row, reason: str) -> None:
        slot = row.segment.slot
        row.sequence.inert = True
        self._result.faults[slot] = reason
        self._model.scrub(slot, self._slots.pages_of(slot))

    def _sample(self, rows: list[tuple[_Row, FloatArray]]) -> None:
        if not rows:
            return
        logits = self._model.logits(np.stack([hidden for _, hidden in rows]))
        for (row, _), row_logits in zip(rows, logits, strict=True):
            self._choose(row, row_logits)

    def _choose(self, row: _Row, logits: FloatArray) -> None:
        slot, sequence = row.segment.slot, row.sequence
        try:
            token, stopped = sequence.sampler.next(logits)
        except ValueError as error:
            self._fail(row, str(error))
            return
        sequence.last_token = token
        sequence.inert = stopped
        self._result.slots.append(slot)
        self._result.tokens.append(token)
        self._result.stopped.append(stopped)
        logprobs = sequence.sampler.logprobs(logits, token)
        if logprobs is not None:
            self._result.logprobs[slot] = logprobs

    def _prompt_logprobs(self, row: _Row, hidden: FloatArray) -> None:
        """Of each token of the chunk, from the hidden state before it; the last chunk kept the first's."""
        before = row.sequence.last_hidden
        states = hidden[:-1] if before is None else np.concatenate([before[None], hidden[:-1]])
        tokens = row.segment.tokens[1:] if before is None else row.segment.tokens
        alternatives = row.sequence.sampler.sampling.prompt_logprobs or 0
        entries: list[TokenLogprobs] = []
        for first in range(0, len(states), _PROMPT_LOGITS_ROWS):
            logits = self._model.logits(states[first : first + _PROMPT_LOGITS_ROWS])
            chunk = tokens[first : first + _PROMPT_LOGITS_ROWS].tolist()
            entries += map(token_logprobs, logits, chunk, [alternatives] * len(chunk))
        self._result.prompt_logprobs[row.segment.slot] = entries
        row.sequence.last_hidden = hidden[-1].copy()


def _split(hidden: FloatArray, batch: RaggedBatch) -> list[FloatArray]:
    """The rows of each segment."""
    return [hidden[start:end] for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)]
