"""Copies a checkpoint's weights into the device's arena: reader threads, pinned staging, one copy stream.

A tensor is cut into pieces that fit a staging buffer. A reader thread takes a piece and a free buffer, reads
(and if need be converts to bf16) the piece into it, and enqueues the copy; the buffer is free again once the
copy is done. So file reads, conversion and copies overlap, and memory peaks at the weights plus the ring.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from math import prod
from queue import SimpleQueue
from time import perf_counter

import numpy as np

from engine.checkpoint import Checkpoint, TensorType
from engine.checkpoint.tensor import Tensor as StoredTensor
from engine.cuda.device import Device, Event, PinnedBuffer, Stream
from engine.cuda.memory import Arena
from engine.cuda.weight_conversion import row_step, write_bf16
from engine.cuda.weights import device_weights
from engine.interface import Progress
from kernels.tensor import DType, Tensor

STAGING_BYTES = 8 << 20
"""Of one staging buffer, unless a block of rows needs more."""
_BUFFERS_PER_THREAD = 2
"""One is filled while the other is copied."""
_MOST_THREADS = 8
_BACKLOG = 4
"""Pieces in hand per thread: enough to keep it busy, few enough to hold little."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading took."""

    bytes: int
    """Written to the device."""
    seconds: float
    converted: tuple[str, ...]
    """Stored types that were converted to bf16, most weights first; empty if all was bf16 already."""

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a stored tensor, and where they go."""

    stored: StoredTensor
    start: int
    stop: int
    target: Tensor
    """bf16 [stop − start, columns]."""


@dataclass(slots=True)
class _Staging:
    """A pinned buffer that is free once `copied` is done."""

    buffer: PinnedBuffer
    copied: Event = field(default_factory=lambda: Event(blocking=True))


def load_weights(
    checkpoint: Checkpoint,
    arena: Arena,
    device: Device,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> LoadReport:
    """Fills every tensor that reserve_weights reserved; returns when all have arrived.

    threads: that read and convert; None takes the process's cores, at most 8. progress: hears "weights" and
    the share done. Raises CheckpointError if a file has shrunk, CudaError.
    """
    began = perf_counter()
    weights = device_weights(checkpoint.config)
    total = sum(prod(weight.shape) for weight in weights) * DType.BF16.bytes
    converted: Counter[str] = Counter()
    loader = _Loader(device, threads or min(_MOST_THREADS, len(os.sched_getaffinity(0))))
    try:
        done = 0
        for piece in loader.run(pieces(checkpoint, arena)):
            done += piece.target.bytes
            if piece.stored.type is not TensorType.BF16:
                converted[str(piece.stored.type)] += piece.target.bytes
            if progress is not None:
                progress("weights", done / total)
    finally:
        loader.close()
    return LoadReport(total, perf_counter() - began, tuple(name for name, _ in converted.most_common()))


def pieces(checkpoint: Checkpoint, arena: Arena) -> Iterator[Piece]:
    """All weights, cut to the size of a staging buffer."""
    for weight in device_weights(checkpoint.config):
        target = arena.tensor(weight.name)
        row = 0
        for part in weight.parts:
            stored = checkpoint.tensor(part)
            rows = stored.shape[0]
            yield from cut(stored, target.rows(row, row + rows), STAGING_BYTES)
            row += rows


def cut(stored: StoredTensor, target: Tensor, most_bytes: int) -> Iterator[Piece]:
    """Pieces of whole rows, none of more than most_bytes on the device unless a step of rows is.

    target: bf16 of the stored tensor's shape. A vector is one row.
    """
    matrix = target.view(len(stored.data), prod(target.shape) // len(stored.data))
    rows, columns = matrix.shape
    step = row_step(stored)
    at_once = max(step, most_bytes // (columns * DType.BF16.bytes) // step * step)
    for start in range(0, rows, at_once):
        stop = min(rows, start + at_once)
        yield Piece(stored, start, stop, matrix.rows(start, stop))


class _Loader:
    """Threads, staging buffers and the copy stream, for the length of one load."""

    def __init__(self, device: Device, threads: int) -> None:
        self._threads = threads
        self._free: SimpleQueue[_Staging] = SimpleQueue()
        self._all: list[_Staging] = []
        self._stream: Stream = device.stream()
        self._pool = ThreadPoolExecutor(threads, "weights", initializer=device.make_current)
        for _ in range(threads * _BUFFERS_PER_THREAD):
            self._all.append(_Staging(PinnedBuffer(STAGING_BYTES)))
            self._free.put(self._all[-1])

    def run(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Yields each piece once its copy has been enqueued; at the end, all have arrived."""
        pending: set[Future[Piece]] = set()
        for piece in pieces:
            pending.add(self._pool.submit(self._load, piece))
            if len(pending) >= self._threads * _BACKLOG:
                finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in finished)
        finished, _ = wait(pending)
        yield from (future.result() for future in finished)
        self._stream.synchronize()

    def _load(self, piece: Piece) -> Piece:
        staging = self._free.get()
        try:
            staging.copied.synchronize()
            size = piece.target.bytes
            if size > staging.buffer.size:
                staging.buffer.close()
                staging.buffer = PinnedBuffer(size)
            bits = staging.buffer.array(piece.target.shape, np.uint16)
            write_bf16(piece.stored, piece.start, piece.stop, bits)
            self._stream.copy_to_device(piece.target.address, staging.buffer.address, size)
            self._stream.record(staging.copied)
        finally:
            self._free.put(staging)
        return piece

    def close(self) -> None:
        """Ends the threads, then frees what they used."""
        self._pool.shutdown(cancel_futures=True)
        self._stream.synchronize()
        for staging in self._all:
            staging.buffer.close()
            staging.copied.close()
        self._stream.close()
