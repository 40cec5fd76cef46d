"""The rows of one forward pass: ragged segments, one per sequence. Knows no plan and no weights."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np

from engine.interface import PAGE_SIZE
from engine.reference.arrays import BoolArray, IntArray
from engine.reference.row_widths import Widths


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one sequence: a chunk of its prompt, or the one token that it decodes."""

    slot: int
    start: int
    """Position of tokens[0]."""
    tokens: IntArray
    is_decode: bool = False
    """The one token was sampled, and is not part of a chunk."""


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """All rows of a pass, segment after segment, then rows of padding that touch no sequence."""

    tokens: IntArray
    """int32 [padded rows]; padding is token 0."""
    positions: IntArray
    """int32 [padded rows]; padding is at position 0."""
    rows: int
    """Rows that are not padding."""
    slots: IntArray
    """int32 [segments]."""
    is_decode: BoolArray
    """bool [segments]."""
    starts: IntArray
    """int32 [segments]: position of each segment's first row."""
    offsets: IntArray
    """int32 [segments + 1]: rows of segment s are offsets[s] … offsets[s + 1] − 1."""
    block_tables: IntArray
    """int32 [segments, entries]."""
    row_pages: IntArray
    """int32 [rows]: the page that takes the row's KV."""
    row_offsets: IntArray
    """int32 [rows]: its place in that page."""
    widths: Widths
    """Numbers of rows at which products agree, for what regroups rows."""

    @property
    def padded_rows(self) -> int:
        return len(self.tokens)


def make_batch(segments: Ordered[Segment], block_tables: IntArray, widths: Widths) -> RaggedBatch:
    """Lays out at least one segment; block_tables is int32 [slots of the engine, entries]."""
    lengths = [len(segment.tokens) for segment in segments]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rows = int(offsets[-1])
    tokens, positions = np.zeros((2, widths.pad(rows)), np.int32)
    tokens[:rows] = np.concatenate([segment.tokens for segment in segments])
    positions[:rows] = np.concatenate(
        [np.arange(segment.start, segment.start + len(segment.tokens)) for segment in segments]
    )
    slots = np.array([segment.slot for segment in segments], np.int32)
    logical_pages, row_offsets = np.divmod(positions[:rows], np.int32(PAGE_SIZE))
    return RaggedBatch(
        tokens=tokens,
        positions=positions,
        rows=rows,
        slots=slots,
        is_decode=np.array([segment.is_decode for segment in segments], np.bool_),
        starts=np.array([segment.start for segment in segments], np.int32),
        offsets=offsets,
        block_tables=block_tables[slots],
        row_pages=block_tables[np.repeat(slots, lengths), logical_pages],
        row_offsets=row_offsets,
        widths=widths,
    )
