"""Copies a checkpoint's weights into the device's arena: reader threads, pinned staging, one copy stream.

A tensor is cut into pieces that fit a staging buffer. A reader thread takes a piece and a free buffer, reads
(and if need be converts) the piece into it, and enqueues the copy and, in the q4 and fp8 tiers, the kernel
that puts it into the tier's form; the buffer is free again once that is done. So file reads, conversion and
copies overlap, and memory peaks at the weights plus the ring.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock
from time import perf_counter

from engine.checkpoint import Checkpoint, TensorType
from engine.cuda import weight_pieces
from engine.cuda.device import Device, Event, PinnedBuffer, Stream
from engine.cuda.memory import Arena
from engine.cuda.owned import Owned
from engine.cuda.weight_pieces import Converter, Piece, QuantisedPiece, pieces, staging_in
from engine.cuda.weights import device_weights
from engine.interface import Progress
from engine.options import Precision
from kernels.launch import KernelLibrary

_BUFFERS_PER_THREAD = 2
"""One is filled while the other is copied."""
_MOST_THREADS = 8
_BACKLOG = 4
"""Pieces in hand per thread: enough to keep it busy, few enough to hold little."""
_UNQUANTISED = (TensorType.BF16, TensorType.F16, TensorType.F32)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading took."""

    bytes: int
    """Written to the device."""
    seconds: float
    converted: tuple[str, ...]
    """Stored types that were converted to bf16, most weights first; empty if all was bf16 already."""
    requantised: tuple[str, ...] = ()
    """Stored types of few bits that were decoded and quantised again, into the tier's; most weights first."""

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds


@dataclass(slots=True)
class _Staging:
    """A pinned buffer that is free once `copied` is done."""

    buffer: PinnedBuffer
    copied: Event = field(default_factory=lambda: Event(blocking=True))

    def close(self) -> None:
        with Owned() as made:
            made.add(self.buffer)
            made.add(self.copied)


def load_weights(
    checkpoint: Checkpoint,
    arena: Arena,
    device: Device,
    *,
    precision: Precision = Precision.BF16,
    library: KernelLibrary | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> LoadReport:
    """Fills every tensor that reserve_weights reserved; returns when all have arrived.

    precision: the tier, as the weights were reserved; for others than BF16 reserve_staging must have reserved
    its buffer. library: weight_pieces.converting_units, for those tiers. threads: that read and convert; None
    takes the process's cores, at most 8. progress: hears "weights" and the share done. Raises CheckpointError
    if a file has shrunk, CudaError.
    """
    began = perf_counter()
    total = sum(weight.bytes for weight in device_weights(checkpoint.config, precision))
    converter = None
    if library is not None:
        library.load_all()  # here, since readers would do so at the same time
        converter = Converter(library, staging_in(arena))
    tally = _Tally()
    threads = threads or min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    with Owned() as made:
        loader = made.add(_Loader(device, threads, converter))
        for piece in loader.run(pieces(checkpoint, arena, precision)):
            tally.count(piece)
            if progress is not None:
                progress("weights", tally.done / total)
    return LoadReport(total, perf_counter() - began, _names(tally.converted), _names(tally.requantised))


@dataclass(slots=True)
class _Tally:
    """Bytes on the device of the pieces that have arrived."""

    done: int = 0
    converted: Counter[TensorType] = field(default_factory=Counter)
    """To bf16, by stored type."""
    requantised: Counter[TensorType] = field(default_factory=Counter)

    def count(self, piece: Piece) -> None:
        self.done += piece.device_bytes
        if isinstance(piece, QuantisedPiece):
            if piece.stored.type not in _UNQUANTISED:
                self.requantised[piece.stored.type] += piece.device_bytes
        elif type(piece) is Piece and piece.stored.type is not TensorType.BF16:
            self.converted[piece.stored.type] += piece.device_bytes


def _names(counted: Counter[TensorType]) -> tuple[str, ...]:
    return tuple(str(stored) for stored, _ in counted.most_common())


class _Loader:
    """Threads, staging buffers and the copy stream, for the length of one load."""

    def __init__(self, device: Device, threads: int, converter: Converter | None) -> None:
        self._threads = threads
        self._converter = converter
        self._sending = Lock()
        """A piece's copy and kernel must not be parted by another's: they share the device's staging."""
        self._free: SimpleQueue[_Staging] = SimpleQueue()
        self._all: list[_Staging] = []
        self._pool = ThreadPoolExecutor(threads, "weights", initializer=device.make_current)
        with Owned() as made:
            self._stream: Stream = made.add(device.stream())
            for _ in range(threads * _BUFFERS_PER_THREAD):
                self._all.append(made.add(_Staging(PinnedBuffer(weight_pieces.STAGING_BYTES))))
                self._free.put(self._all[-1])
            made.release()

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
            if piece.staged_bytes > staging.buffer.size:
                staging.buffer.close()
                staging.buffer = PinnedBuffer(piece.staged_bytes)
            piece.write(staging.buffer)
            with self._sending:
                piece.send(self._stream, staging.buffer.address, self._converter)
                self._stream.record(staging.copied)
        finally:
            self._free.put(staging)
        return piece

    def close(self) -> None:
        """Ends the threads, then frees what they used."""
        with Owned() as made:
            made.add(self._stream)
            for staging in self._all:
                made.add(staging)
            self._pool.shutdown(cancel_futures=True)
            self._stream.synchronize()
