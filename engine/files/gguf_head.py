"""Reads the head of a GGUF file: its metadata, and where the tensor table begins. Trusts nothing in it.

Layout: magic, u32 version, u64 tensors, u64 keys, then keys with typed values. Own code because the `gguf`
package's reader makes numpy views of every token and merge (1.6 s for a vocabulary of 49,152 where this
takes 0.07 s) and loops without bound on hostile counts.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.errors import CheckpointError
from engine.files.mapping import map_file

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING = 8
_ARRAY = 9
_U32 = _SCALARS[4]
_U64 = _SCALARS[10]

_MAX_TENSORS = 1_000_000
_MAX_KEYS = 100_000
_MAX_HEAD_BYTES = 1 << 28
"""The largest heads in use have some 20 MB; what is read takes up to nine times as much as Python objects."""

SETTING_ARRAY = 4096
"""Entries of the longest array that can be a setting; longer ones are the tokenizer's."""


@dataclass(frozen=True, slots=True)
class SkippedArray:
    """An array too long to be a setting."""

    length: int


@dataclass(frozen=True, slots=True)
class GgufHead:
    """What stands before the tensor table."""

    metadata: dict[str, object]
    """Numbers, bools, strings, lists of them; SkippedArray for lists that were not asked for."""
    n_tensors: int


class GgufCursor:
    """Walks over the mapped bytes of the head; every step is checked against what is there."""

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self._path = path
        self._view = memoryview(data.data)[:_MAX_HEAD_BYTES]
        self.position = 0
        """Bytes read so far."""

    def error(self, problem: str) -> CheckpointError:
        """The error to raise about this file."""
        return CheckpointError(f"{self._path}: {problem}")

    def starts_with(self, magic: bytes) -> bool:
        """Passes over `magic` if it comes next."""
        is_next = self._view[self.position : self.position + len(magic)] == magic
        self.position += len(magic) if is_next else 0
        return is_next

    def take(self, size: int) -> memoryview:
        """The next `size` bytes."""
        end = self.position + size
        if end > len(self._view):
            raise self.error(f"truncated or malformed: {size} bytes wanted at {self.position}")
        part = self._view[self.position : end]
        self.position = end
        return part

    def scalar(self, layout: struct.Struct) -> int | float | bool:
        value: int | float | bool = layout.unpack(self.take(layout.size))[0]
        return value

    def u32(self) -> int:
        return int(self.scalar(_U32))

    def u64(self) -> int:
        return int(self.scalar(_U64))

    def string(self) -> str:
        """Bytes that are no UTF-8 become U+FFFD: some converters wrote tokens cut inside a character, and
        such a token can match no text anyway."""
        return str(self.take(self.u64()), "utf-8", "replace")

    def strings(self, count: int, *, is_kept: bool) -> list[str]:
        """The next `count` strings, or nothing if they are only passed over."""
        view, position, limit = self._view, self.position, len(self._view)
        length_at = _U64.unpack_from
        found: list[str] = []
        for _ in range(count):
            start = position + 8
            if start > limit:
                raise self.error("truncated or malformed: a list of strings ends early")
            position = start + length_at(view, position)[0]
            if position > limit:
                raise self.error("truncated or malformed: a list of strings ends early")
            if is_kept:
                found.append(str(view[start:position], "utf-8", "replace"))
        self.position = position
        return found


def read_gguf_metadata(path: Path) -> dict[str, object]:
    """All keys and values of a GGUF file, the tokenizer's long arrays included.

    Raises CheckpointError for a file that is no GGUF, truncated, or lies about its sizes.
    """
    return read_gguf_head(GgufCursor(path, map_file(path)), longest_array=None).metadata


def read_gguf_head(cursor: GgufCursor, *, longest_array: int | None = SETTING_ARRAY) -> GgufHead:
    """Reads up to the tensor table, at the file's start. Raises CheckpointError.

    Arrays of more than `longest_array` entries are skipped; None: none is.
    """
    if not cursor.starts_with(b"GGUF"):
        raise cursor.error("this is not a GGUF file")
    version = cursor.u32()
    if version not in (2, 3):
        raise cursor.error(f"GGUF version {version} is not supported; supported are 2 and 3 (little-endian)")
    n_tensors, n_keys = cursor.u64(), cursor.u64()
    if n_tensors > _MAX_TENSORS or n_keys > _MAX_KEYS:
        raise cursor.error(f"malformed: it claims {n_tensors} tensors and {n_keys} keys")
    metadata: dict[str, object] = {}
    for _ in range(n_keys):
        key = cursor.string()
        if key in metadata:
            raise cursor.error(f"malformed: key {key!r} stands there twice")
        metadata[key] = _value(cursor, longest_array)
    return GgufHead(metadata, n_tensors)


def _value(cursor: GgufCursor, longest_array: int | None) -> object:
    kind = cursor.u32()
    if kind == _STRING:
        return cursor.string()
    if kind == _ARRAY:
        return _array(cursor, longest_array)
    return cursor.scalar(_layout(cursor, kind))


def _array(cursor: GgufCursor, longest: int | None) -> list[object] | SkippedArray:
    kind, count = cursor.u32(), cursor.u64()
    if kind == _ARRAY:
        raise cursor.error("arrays of arrays are not supported")
    is_kept = longest is None or count <= longest
    if kind == _STRING:
        strings = cursor.strings(count, is_kept=is_kept)
        return [*strings] if is_kept else SkippedArray(count)
    layout = _layout(cursor, kind)
    part = cursor.take(count * layout.size)
    return [value for (value,) in layout.iter_unpack(part)] if is_kept else SkippedArray(count)


def _layout(cursor: GgufCursor, kind: int) -> struct.Struct:
    layout = _SCALARS.get(kind)
    if layout is None:
        raise cursor.error(f"malformed: unknown value type {kind}")
    return layout
