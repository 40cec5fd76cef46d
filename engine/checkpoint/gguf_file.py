"""Reads a GGUF file's tensor table, which follows its head; the tensors are mapped views.

Trusts nothing in it: names, shapes, types and offsets are checked, and no tensor overlaps another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray

from engine.checkpoint.tensor import SourceTensor
from engine.files.gguf_head import GgufCursor, read_gguf_head
from engine.files.mapping import map_file, view_bytes
from engine.quantization.tensor_type import TensorType

_TYPES = {int(GGMLQuantizationType[t.name]): t for t in TensorType if t is not TensorType.F8_E4M3}
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What the file says, unread weights included."""

    path: Path
    metadata: dict[str, object]
    """Settings; the tokenizer's long arrays are skipped."""
    tensors: dict[str, SourceTensor]
    """By the file's names; shapes are slowest dimension first, as everywhere here."""


def read_gguf(path: Path) -> GgufFile:
    """Settings and tensors of a GGUF file. Raises CheckpointError if anything about it is wrong."""
    data = map_file(path)
    cursor = GgufCursor(path, data)
    head = read_gguf_head(cursor)
    infos = [_tensor_info(cursor) for _ in range(head.n_tensors)]
    return GgufFile(path, head.metadata, _tensors(cursor, data, head.metadata, infos))


@dataclass(frozen=True, slots=True)
class _Info:
    name: str
    shape: tuple[int, ...]
    number: int
    offset: int


def _tensor_info(cursor: GgufCursor) -> _Info:
    name = cursor.string()
    n_dimensions = cursor.u32()
    if n_dimensions > _MAX_DIMENSIONS:
        raise cursor.error(f"malformed: tensor {name!r} has {n_dimensions} dimensions")
    fastest_first = [cursor.u64() for _ in range(n_dimensions)]
    return _Info(name, tuple(reversed(fastest_first)), cursor.u32(), cursor.u64())


def _tensors(
    cursor: GgufCursor, data: NDArray[np.uint8], metadata: dict[str, object], infos: list[_Info]
) -> dict[str, SourceTensor]:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.error(f"malformed: an alignment of {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, SourceTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for info in infos:
        if info.name in tensors:
            raise cursor.error(f"malformed: tensor {info.name!r} stands there twice")
        tensor_type, size = _type_and_size(cursor, info)
        if info.offset % alignment or start + info.offset + size > len(data):
            raise cursor.error(f"truncated or malformed: tensor {info.name!r} reaches beyond the file")
        spans.append((info.offset, info.offset + size, info.name))
        read = partial(view_bytes, data, start + info.offset, size)
        tensors[info.name] = SourceTensor(info.name, tensor_type, info.shape, read)
    spans.sort()
    for (_, end, name), (begin, _, other) in pairwise(spans):
        if begin < end:
            raise cursor.error(f"malformed: tensors {name!r} and {other!r} overlap")
    return tensors


def _type_and_size(cursor: GgufCursor, info: _Info) -> tuple[TensorType | str, int]:
    try:
        ggml = GGMLQuantizationType(info.number)
        elements, size = GGML_QUANT_SIZES[ggml]
    except (ValueError, KeyError):
        raise cursor.error(f"tensor {info.name!r} has the unknown type {info.number}") from None
    count = prod(info.shape)
    if not info.shape or count <= 0 or info.shape[-1] % elements:
        raise cursor.error(f"malformed: tensor {info.name!r} has the impossible shape {list(info.shape)}")
    return _TYPES.get(info.number, ggml.name), count // elements * size
