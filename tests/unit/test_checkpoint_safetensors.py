"""Safetensors files, sound and hostile. The public library is the oracle for sound ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from engine.checkpoint.safetensors import MAX_HEADER_BYTES, read_safetensors
from engine.errors import CheckpointError
from engine.quantization import TensorType
from scripts.random_checkpoint import write_safetensors


def _file(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    return path


def _entry(begin: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_reads_what_the_public_library_writes(tmp_path: Path) -> None:
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.ones((3, 1, 2), np.float16),
        "scalar": np.asarray(7, np.float32),
        "integers": np.arange(5),
        "empty": np.zeros((0, 4), np.float32),
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(save(tensors))
    read = read_safetensors(path)
    assert set(read) == set(tensors)
    for name, values in tensors.items():
        assert read[name].shape == values.shape
        assert read[name].read().tobytes() == values.tobytes()
    assert (read["a"].type, read["b"].type, read["integers"].type) == (TensorType.F32, TensorType.F16, "I64")


def test_own_writer_is_read_back_with_every_type(tmp_path: Path) -> None:
    tensors = {
        "bf16": np.arange(8, dtype=np.float32).astype(ml_dtypes.bfloat16),
        "fp8": np.arange(3, dtype=np.float32).astype(ml_dtypes.float8_e4m3fn),
    }
    write_safetensors(tmp_path / "x.safetensors", tensors)
    read = read_safetensors(tmp_path / "x.safetensors")
    assert [read[name].type for name in tensors] == [TensorType.BF16, TensorType.F8_E4M3]
    assert all(read[name].read().tobytes() == tensors[name].tobytes() for name in tensors)


def test_views_are_of_the_mapped_file_and_read_only(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", {"a": np.zeros(4, np.float32)})
    view = read_safetensors(tmp_path / "x.safetensors")["a"].read()
    assert not view.flags.owndata
    assert not view.flags.writeable


HOSTILE: dict[str, tuple[object, bytes, str]] = {
    "not json": (b"{nonsense", b"", "malformed header"),
    "not utf-8": (b"\xff\xfe\xff\xfe", b"", "malformed header"),
    "not an object": ([1, 2], b"", "not an object"),
    "deeply nested": (b"[" * 100_000, b"", "malformed header"),
    "huge integer": (b'{"a": ' + b"9" * 10_000 + b"}", b"", "malformed header"),
    "a name twice": (b'{"a": {}, "a": {}}', b"", "twice"),
    "entry is no object": ({"a": 3}, b"", "malformed entry"),
    "unknown type": ({"a": _entry(0, 4, [1], "F7")}, b"1234", "unknown type 'F7'"),
    "type is no string": ({"a": _entry(0, 4, [1], 4)}, b"1234", "unknown type 4"),  # type: ignore[arg-type]
    "negative dimension": ({"a": _entry(0, 4, [-1])}, b"1234", "malformed shape"),
    "fractional dimension": ({"a": _entry(0, 4, [1.5])}, b"1234", "malformed shape"),
    "boolean dimension": ({"a": _entry(0, 4, [True])}, b"1234", "malformed shape"),
    "shape that overflows": ({"a": _entry(0, 4, [2**33, 2**33])}, b"1234", "needs"),
    "enormous dimension": ({"a": _entry(0, 4, [2**63])}, b"1234", "malformed shape"),
    "many dimensions": ({"a": _entry(0, 4, [1] * 1000)}, b"1234", "malformed shape"),
    "offsets reversed": ({"a": _entry(4, 0, [1])}, b"1234", "malformed offsets"),
    "offsets negative": ({"a": _entry(-4, 0, [1])}, b"1234", "malformed offsets"),
    "three offsets": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, b"1234", "offsets"),
    "too few bytes": ({"a": _entry(0, 4, [2])}, b"12345678", "needs 8 bytes but is given 4"),
    "beyond the file": ({"a": _entry(0, 400, [100])}, b"1234", "truncated"),
    "far beyond the file": ({"a": _entry(2**62, 2**62 + 4, [1])}, b"1234", "truncated"),
    "overlap": ({"a": _entry(0, 8, [2]), "b": _entry(4, 12, [2])}, b"x" * 12, "overlaps"),
    "same place": ({"a": _entry(0, 4, [1]), "b": _entry(0, 4, [1])}, b"x" * 4, "overlaps"),
    "hole": ({"a": _entry(0, 4, [1]), "b": _entry(8, 12, [1])}, b"x" * 12, "belong to none"),
    "bytes at the end": ({"a": _entry(0, 4, [1])}, b"x" * 12, "the last 8 bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_give_one_clear_error(name: str, tmp_path: Path) -> None:
    header, data, problem = HOSTILE[name]
    path = _file(tmp_path / "evil.safetensors", header, data)
    with pytest.raises(CheckpointError, match=problem) as caught:
        read_safetensors(path)
    assert "evil.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**40, 2**64 - 1])
def test_gigabytes_of_header_are_refused_unread(length: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"claims a header of {length} bytes"):
        read_safetensors(_file(tmp_path / "x.safetensors", {}, length=length))


@pytest.mark.parametrize("size", [0, 1, 7])
def test_files_too_short_for_a_length(size: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\0" * size)
    with pytest.raises(CheckpointError, match=r"empty|truncated"):
        read_safetensors(path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    tensors = {"a": np.ones(3, np.float32), "b": np.ones((2, 2), np.float16)}
    path = tmp_path / "x.safetensors"
    write_safetensors(path, tensors)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            read_safetensors(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_safetensors(tmp_path / "none.safetensors")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_flipped_bytes_are_read_or_refused_never_worse(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    write_safetensors(path, {"a": np.ones(3, np.float32), "b": np.ones((2, 2), np.float16)})
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(whole) - 1))
        whole[position] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    try:
        tensors = read_safetensors(path)
    except CheckpointError:
        return
    for tensor in tensors.values():
        assert tensor.read().nbytes <= len(whole)
