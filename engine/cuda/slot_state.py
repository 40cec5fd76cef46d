"""Applies the host's changes to slots and block tables on the device, before a step's rows run.

Knows no model: it copies what staging has written and launches the two slot kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.cuda.buffers import Buffers
from engine.cuda.device import Stream
from engine.cuda.memory import Arena
from engine.cuda.regions import HostRegion, Region, device_view
from engine.cuda.work import StepWork
from engine.interface import Sampling, SlotStart
from kernels.launch import KernelLibrary
from kernels.slots import START_DTYPE, SlotSetup, change_slots, stage_starts, start_slots
from kernels.tensor import DType

_ALIGNMENT = 16


class SlotControl:
    """Of one stream."""

    def __init__(
        self, library: KernelLibrary, buffers: Buffers, region: Region, device: Arena, stream: Stream
    ) -> None:
        """device: the staging region there."""
        self._library = library
        self._slots = buffers.slots
        self._stream = stream
        self._starts = device.tensor("starts")
        self._starts_offset = region.layout.reservations["starts"].offset
        self._pages = device.tensor("pages")
        self._pages_offset = region.layout.reservations["pages"].offset
        self._base = device.address
        self._change = change_slots(
            library,
            counts=device.tensor("counts"),
            changes=device.tensor("changes"),
            pages=self._pages,
            slots=buffers.slots,
            block_table=buffers.block_table,
        )

    def start(self, starts: Sequence[SlotStart], host: HostRegion) -> None:
        """Gives slots new sequences. Waits for the stream only where their histories do not fit at once."""
        setups = [_setup(start, self._slots.shape.vocab) for start in starts]
        batches = list(_batches(setups, self._starts.bytes))
        for index, batch in enumerate(batches):
            if index > 0:
                self._stream.synchronize()
            self._start_batch(batch, host)

    def change(self, work: StepWork, host: HostRegion) -> None:
        """Copies what is staged, then applies slot and page changes."""
        if work.copy_bytes:
            self._stream.copy_to_device(self._base, host.address, work.copy_bytes)
        if work.pages:
            size = work.pages * self._pages.shape[1] * DType.I32.bytes
            self._stream.copy_to_device(self._pages.address, host.address + self._pages_offset, size)
        if work.pages or work.changes:
            self._change(self._stream.handle)

    def _start_batch(self, setups: Sequence[SlotSetup], host: HostRegion) -> None:
        staged = stage_starts(setups, self._slots.shape)
        arrays = (staged.starts.view(np.uint8), staged.tokens, staged.bias_ids, staged.bias_values)
        target = host["starts"]
        offsets, end = [], 0
        for array in arrays:
            offsets.append(end)
            target[end : end + array.nbytes] = array.view(np.uint8)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._stream.copy_to_device(self._starts.address, host.address + self._starts_offset, end)
        records = device_view(self._starts, offsets[0], (len(setups), START_DTYPE.itemsize), DType.U8)
        tokens, bias_ids, bias_values = (
            device_view(self._starts, offset, (len(array),), dtype)
            for offset, array, dtype in zip(
                offsets[1:], arrays[1:], (DType.I32, DType.I32, DType.F32), strict=True
            )
        )
        start_slots(
            self._library,
            starts=records,
            count=len(setups),
            tokens=tokens,
            bias_ids=bias_ids,
            bias_values=bias_values,
            slots=self._slots,
        )(self._stream.handle)


def _batches(setups: Sequence[SlotSetup], room: int) -> list[list[SlotSetup]]:
    """Cut so that each fits into `room` bytes."""
    batches: list[list[SlotSetup]] = [[]]
    left = room
    for setup in setups:
        size = _setup_bytes(setup)
        if size > left and batches[-1]:
            batches.append([])
            left = room
        batches[-1].append(setup)
        left -= size
    return [batch for batch in batches if batch]


def _setup_bytes(setup: SlotSetup) -> int:
    histories = (setup.prompt, setup.output) if setup.penalised else ()
    numbers = sum(len(history) for history in histories if history is not None)
    numbers += len(setup.stop_ids) + 2 * len(setup.bias or {})
    return START_DTYPE.itemsize + 4 * numbers + 4 * _ALIGNMENT


def _setup(start: SlotStart, vocab: int) -> SlotSetup:
    sampling: Sampling = start.sampling
    return SlotSetup(
        slot=start.slot,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        min_tokens=sampling.min_tokens,
        logprobs=sampling.logprobs,
        stop_ids=[token for token in sampling.stop_token_ids if 0 <= token < vocab],
        bias=sampling.logit_bias,
        prompt=start.prompt,
        output=start.output,
    )
