"""A file mapped into memory, read-only. Its pages come from disk when they are first touched."""

from __future__ import annotations

import mmap
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.errors import CheckpointError


def map_file(path: Path) -> NDArray[np.uint8]:
    """The whole file as uint8 [size]; unmapped once nothing refers to it. Raises CheckpointError."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for a writer
            raise CheckpointError(f"{path} is no regular file")
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise CheckpointError(f"{path} is empty")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return np.frombuffer(mapped, np.uint8)


def view_bytes(data: NDArray[np.uint8], start: int, size: int) -> NDArray[np.uint8]:
    """A view of bytes start … start + size − 1, which the caller has checked to exist."""
    return data[start : start + size]
