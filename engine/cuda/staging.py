"""Writes a plan into pinned memory in the layout that the device reads: lists, never per-slot calls.

One region, one copy a step for everything but new sequences' settings. Needs no GPU and enqueues nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.cuda.buckets import pick
from engine.cuda.buffers import BufferPlan
from engine.cuda.ledger import Ledger
from engine.cuda.memory import Layout
from engine.cuda.reach import reach
from engine.cuda.regions import Region
from engine.cuda.work import PrefillWork, PromptSpan, SampleKey, SampleWork, StepWork
from engine.interface import PrefillChunk, StepPlan
from kernels.attention_prefill import TILE_INTS, most_tiles, tile_list
from kernels.slots import CHANGE_INTS, START_DTYPE
from kernels.tensor import DType

STARTS_BYTES = 4 << 20
"""Of the lists of new sequences, or more where one sequence alone needs it."""
_PADDING = -1
_STAYS = -1


class HostArrays(Protocol):
    """Arrays by name: a regions.HostRegion, or a dictionary."""

    def __getitem__(self, name: str) -> NDArray[Any]: ...


class Stager:
    """Lays steps out. Knows what the device already has from the step before."""

    def __init__(self, plan: BufferPlan, widths: Sequence[int], sizes: Sequence[int]) -> None:
        self.plan = plan
        self.region = Region("staging", _layout(plan))
        self._widths = widths
        self._sizes = sizes
        self._reach = {width: reach(plan, width) for width in widths}
        self._decode_bytes = sum(self.region.span("counts", "decode_slots"))
        self._prefill_bytes = sum(self.region.span("counts", "prompt_alternatives"))
        (self.prompt_rows,) = self.region.layout.reservations["prompt_rows"].shape
        """Most prompt tokens of a step that want log-probabilities, padding included."""
        self._decodes_there: list[int] | None = None

    def stage(self, step: StepPlan, host: HostArrays, ledger: Ledger) -> StepWork:
        """Writes a plan that the ledger has taken."""
        chunks = [chunk for chunk in step.prefills if not ledger.has_ended(chunk.slot)]
        decodes = ledger.live(step.decodes) if step.decodes else []
        decode = self._decode_work(decodes, ledger) if decodes else None
        if not chunks and not step.pages and (not decodes or decodes == self._decodes_there):
            return StepWork(0, 0, 0, None, decode)
        if decode is not None:
            _fill(host["decode_slots"], decodes, decode.key.width)
            self._decodes_there = decodes
        else:
            self._decodes_there = None
        changes = [(c.slot, c.start + len(c.tokens) - 1, _STAYS, 0) for c in chunks if c.is_last]
        pages = [(page.slot, page.index, page.page, 0) for page in step.pages]
        host["counts"][:] = len(changes), len(pages)
        if changes:
            host["changes"][: len(changes)] = changes
        if pages:
            host["pages"][: len(pages)] = pages
        prefill = self._prefill(chunks, host, ledger) if chunks else None
        copied = self._decode_bytes if prefill is None else self._prefill_bytes
        return StepWork(copied, len(changes), len(pages), prefill, decode)

    def _sample_work(self, slots: list[int], ledger: Ledger) -> SampleWork:
        width = pick(self._widths, len(slots))
        return SampleWork(slots, SampleKey(width, ledger.all_greedy(slots), ledger.any_logprobs(slots)))

    def _decode_work(self, slots: list[int], ledger: Ledger) -> SampleWork:
        work = self._sample_work(slots, ledger)
        reach = self._reach[work.key.width]
        if reach is None:
            return work
        tokens = ledger.positions(np.array(slots))
        is_long = tokens.max() > max(reach.tokens, reach.share * tokens.sum())
        return SampleWork(slots, replace(work.key, long=bool(is_long)))

    def _prefill(self, chunks: list[PrefillChunk], host: HostArrays, ledger: Ledger) -> PrefillWork:
        slots = [chunk.slot for chunk in chunks]
        lengths = [len(chunk.tokens) for chunk in chunks]
        starts = [chunk.start for chunk in chunks]
        ends = np.cumsum(lengths)
        size = pick(self._sizes, int(ends[-1]))
        _fill(host["tokens"], np.concatenate([chunk.tokens for chunk in chunks]), size)
        _fill(host["row_slot"], np.repeat(slots, lengths), size)
        positions = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        _fill(host["row_position"], np.concatenate(positions), size)
        for index, tiles_of in enumerate(self.plan.tile_classes):
            tiles = tile_list(slots, lengths, starts, tiles_of.group, tiles_of.variant)
            host[f"n_tiles.{index}"][0] = len(tiles)
            host[f"tiles.{index}"][: len(tiles)] = tiles
        last = [
            (slot, int(end) - 1)
            for chunk, slot, end in zip(chunks, slots, ends, strict=True)
            if chunk.is_last
        ]
        first_tokens = None
        if last:
            first_tokens = self._sample_work([slot for slot, _ in last], ledger)
            _fill(host["first_slots"], [slot for slot, _ in last], first_tokens.key.width)
            _fill(host["last_rows"], [row for _, row in last], first_tokens.key.width, padding=0)
        spans, carried = self._prompt_rows(chunks, ends, host, ledger)
        return PrefillWork(size, first_tokens, spans, carried)

    def _prompt_rows(
        self, chunks: list[PrefillChunk], ends: NDArray[np.int64], host: HostArrays, ledger: Ledger
    ) -> tuple[list[PromptSpan], list[tuple[int, int]]]:
        """The rows before each prompt token that wants a log-probability: the first of a later chunk has its
        row among the carried ones, behind all rows of a pass.
        """
        spans: list[PromptSpan] = []
        carried: list[tuple[int, int]] = []
        count = 0
        for chunk, end in zip(chunks, ends.tolist(), strict=True):
            alternatives = ledger.prompt_logprobs(chunk.slot)
            if alternatives is None:
                continue
            rows = np.arange(end - len(chunk.tokens), end - 1)
            targets = chunk.tokens[1:]
            if chunk.start > 0:
                rows = np.concatenate([[self.plan.sizes.rows + chunk.slot], rows])
                targets = chunk.tokens
            stop = count + len(rows)
            host["prompt_rows"][count:stop] = rows
            host["prompt_targets"][count:stop] = targets
            host["prompt_alternatives"][count:stop] = alternatives
            spans.append(PromptSpan(chunk.slot, count, len(rows)))
            count = stop
            if not chunk.is_last:
                carried.append((end - 1, chunk.slot))
        at_once = self.plan.sizes.logit_rows
        padded = -(-count // at_once) * at_once
        host["prompt_rows"][count:padded] = 0
        host["prompt_targets"][count:padded] = _PADDING
        host["prompt_alternatives"][count:padded] = _PADDING
        return spans, carried


def starts_bytes(plan: BufferPlan) -> int:
    """Room for the lists of new sequences: for any single one at least."""
    shape = plan.slot_shape
    longest = START_DTYPE.itemsize + 4 * (plan.sizes.positions + shape.max_stop + 2 * shape.max_bias)
    return max(STARTS_BYTES, longest + 256)


def _layout(plan: BufferPlan) -> Layout:
    sizes = plan.sizes
    prompt_rows = -(-sizes.rows // sizes.logit_rows) * sizes.logit_rows
    shapes: Mapping[str, tuple[int, ...]] = {
        "counts": (2,),
        "changes": (sizes.slots, CHANGE_INTS),
        "decode_slots": (sizes.width,),
        **_tile_shapes(plan),
        "tokens": (sizes.rows,),
        "row_slot": (sizes.rows,),
        "row_position": (sizes.rows,),
        "first_slots": (sizes.width,),
        "last_rows": (sizes.width,),
        "prompt_rows": (prompt_rows,),
        "prompt_targets": (prompt_rows,),
        "prompt_alternatives": (prompt_rows,),
        "pages": (sizes.slots * sizes.table_width, CHANGE_INTS),
    }
    layout = Layout()
    for name, shape in shapes.items():
        layout.add("staging", name, shape, DType.I32)
    layout.add("staging", "starts", (starts_bytes(plan),), DType.U8)
    return layout


def _tile_shapes(plan: BufferPlan) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for index, tiles in enumerate(plan.tile_classes):
        most = most_tiles(plan.sizes.rows, plan.sizes.slots, tiles.group, tiles.variant)
        shapes |= {f"n_tiles.{index}": (1,), f"tiles.{index}": (most, TILE_INTS)}
    return shapes


def _fill(target: NDArray[np.int32], values: Any, size: int, padding: int = _PADDING) -> None:
    """The values, then padding up to `size`."""
    target[: len(values)] = values
    target[len(values) : size] = padding
