"""Copies a checkpoint's weights into the device's arena: reader threads, pinned staging, one copy stream.

A tensor is cut into pieces that fit a staging buffer. A reader thread takes a piece and a free buffer, reads
(and if need be converts to bf16) the piece into it, and enqueues the copy; the buffer is free again once the
copy is done. So file reads, conversion and copies overlap, and memory peaks at the weights plus the ring.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint import Checkpoint
from engine.cuda.device import Device
from engine.cuda.memory import Arena
from engine.interface import Progress


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading took."""

    bytes: int
    """Written to the device."""
    seconds: float
    converted: tuple[str, ...]
    """Stored types that were converted to bf16, most bytes first; empty if all was bf16 already."""

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds


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
    raise NotImplementedError
