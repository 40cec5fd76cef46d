"""Reads .safetensors files as mapped views, trusting nothing in them.

Layout: u64 length of a JSON header, the header, then the bytes of all tensors without holes. The header
gives each tensor's dtype, shape and [begin, end) in those bytes.
"""

from __future__ import annotations

import json
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.tensor import SourceTensor
from engine.errors import CheckpointError
from engine.files.mapping import map_file, view_bytes
from engine.quantization.tensor_type import TensorType

MAX_HEADER_BYTES = 100_000_000
"""As the public library allows: some 800,000 tensors."""

_MAX_DIMENSIONS = 8
_MAX_DIMENSION = 2**40

_TYPES = {
    "F32": TensorType.F32,
    "F16": TensorType.F16,
    "BF16": TensorType.BF16,
    "F8_E4M3": TensorType.F8_E4M3,
}
_OTHER_TYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "I32": 4,
    "U32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
"""Types that no weight we use may have, but that unused tensors beside them do."""


def read_safetensors(path: Path) -> dict[str, SourceTensor]:
    """All tensors of one file by name. Raises CheckpointError if anything about the file is wrong."""
    data = map_file(path)
    header, start = _header(path, data)
    spans: list[tuple[int, int, str]] = []
    tensors: dict[str, SourceTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensor_type, shape, begin, end = _entry(path, name, entry)
        spans.append((begin, end, name))
        read = partial(view_bytes, data, start + begin, end - begin)
        tensors[name] = SourceTensor(name, tensor_type, shape, read)
    _check_spans(path, spans, len(data) - start)
    return tensors


def _header(path: Path, data: NDArray[np.uint8]) -> tuple[dict[str, object], int]:
    """(the parsed header, where the tensors' bytes begin)."""
    if len(data) < 8:
        raise CheckpointError(f"{path} is truncated: {len(data)} bytes are too few for a header")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path} is not a safetensors file: it claims a header of {length} bytes")
    if length > len(data) - 8:
        raise CheckpointError(f"{path} is truncated: its header has {length} bytes, the file {len(data)}")
    try:
        text = data[8 : 8 + length].tobytes().decode()
        header = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a malformed header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a malformed header: it is not an object")
    return header, 8 + length


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"{name!r} stands there twice")
        result[name] = value
    return result


def _entry(path: Path, name: str, entry: object) -> tuple[TensorType | str, tuple[int, ...], int, int]:
    """(type, shape, begin, end) of one tensor, consistent with one another."""

    def broken(problem: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name!r} {problem}")

    if not isinstance(entry, dict):
        raise broken("has a malformed entry")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or (dtype not in _TYPES and dtype not in _OTHER_TYPE_BYTES):
        raise broken(f"has an unknown type {dtype!r}")
    shape = _naturals(entry.get("shape"))
    if shape is None or len(shape) > _MAX_DIMENSIONS or max(shape, default=0) > _MAX_DIMENSION:
        raise broken("has a malformed shape")
    offsets = _naturals(entry.get("data_offsets"))
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise broken("has malformed offsets")
    begin, end = offsets
    size = prod(shape) * (_TYPES[dtype].block_bytes if dtype in _TYPES else _OTHER_TYPE_BYTES[dtype])
    if end - begin != size:
        raise broken(f"of {dtype} {list(shape)} needs {size} bytes but is given {end - begin}")
    return _TYPES.get(dtype, dtype), shape, begin, end


def _naturals(value: object) -> tuple[int, ...] | None:
    """A list of integers ≥ 0 as a tuple; None if it is anything else."""
    if not isinstance(value, list):
        return None
    naturals = tuple(i for i in value if isinstance(i, int) and not isinstance(i, bool) and i >= 0)
    return naturals if len(naturals) == len(value) else None


def _check_spans(path: Path, spans: list[tuple[int, int, str]], available: int) -> None:
    """Tensors must fill the bytes behind the header exactly: no overlap, no hole, nothing beyond."""
    position = 0
    for begin, end, name in sorted(spans):
        if end > available:
            raise CheckpointError(
                f"{path} is truncated: tensor {name!r} ends {end - available} bytes past it"
            )
        if begin < position:
            raise CheckpointError(f"{path}: tensor {name!r} overlaps another")
        if begin > position:
            raise CheckpointError(f"{path}: {begin - position} bytes before tensor {name!r} belong to none")
        position = end
    if position != available:
        raise CheckpointError(f"{path}: the last {available - position} bytes belong to no tensor")
