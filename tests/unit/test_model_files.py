"""The outer form of model files: GGUF heads of every kind and ones that lie, names of parts, JSON."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from gguf import GGUFWriter

from engine.checkpoint.gguf_file import read_gguf
from engine.errors import CheckpointError, ConfigError
from engine.files import gguf_head, json_file
from engine.files.gguf_head import SkippedArray, read_gguf_metadata
from engine.files.gguf_names import gguf_part_names
from engine.files.json_file import read_json_object, read_optional_json_object

Reader = Callable[[Path], object]
READERS: tuple[Reader, ...] = (read_gguf_metadata, read_gguf)

# ---- GGUF heads


def _head(n_keys: int, body: bytes = b"", *, version: int = 3, n_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + body


def _string(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


KEY = _string(b"k")


def _value(kind: int, data: bytes) -> bytes:
    return _head(1, KEY + struct.pack("<I", kind) + data)


HOSTILE = {
    "empty": (b"", "empty"),
    "cut in the magic": (b"GG", "not a GGUF file"),
    "cut after the magic": (b"GGUF", "truncated"),
    "other magic": (b"ELF\x7f" + bytes(100), "not a GGUF file"),
    "version 1": (_head(0, version=1), "version 1 is not supported"),
    "big-endian": (_head(0, version=3 << 24), "is not supported"),
    "2^64 tensors": (_head(0, n_tensors=2**64 - 1), "claims"),
    "2^60 keys": (_head(2**60), "claims"),
    "keys in nothing": (_head(100_000), "truncated"),
    "key of 2^63 bytes": (_head(1, _string(b"a", 2**63)), "truncated"),
    "string of 2^64 bytes": (_value(8, struct.pack("<Q", 2**64 - 1)), "truncated"),
    "unknown value type": (_value(99, bytes(16)), "unknown value type 99"),
    "array of an unknown type": (_value(9, struct.pack("<IQ", 99, 1) + bytes(16)), "unknown value type 99"),
    "array of 2^60 bytes": (_value(9, struct.pack("<IQ", 0, 2**60)), "truncated"),
    "array of 2^62 integers": (_value(9, struct.pack("<IQ", 4, 2**62) + bytes(16)), "truncated"),
    "array of 2^60 strings": (_value(9, struct.pack("<IQ", 8, 2**60) + bytes(16)), "ends early"),
    "strings that leap out": (_value(9, struct.pack("<IQQ", 8, 5000, 2**62)), "ends early"),
    "few strings that leap out": (_value(9, struct.pack("<IQQ", 8, 2, 2**62)), "ends early"),
    "arrays in arrays": (_value(9, struct.pack("<IQ", 9, 1) * 9 + bytes(99)), "arrays of arrays"),
    "a key twice": (_head(2, (KEY + struct.pack("<IB", 0, 1)) * 2), "twice"),
}


@pytest.mark.parametrize("read", READERS, ids=["metadata", "whole"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_heads_give_one_clear_error(name: str, read: Reader, tmp_path: Path) -> None:
    data, problem = HOSTILE[name]
    path = tmp_path / "evil.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=problem) as caught:
        read(path)
    assert "evil.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_head_beyond_its_bound_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.gguf"
    path.write_bytes(_value(8, _string(b"x" * 500)))
    assert read_gguf_metadata(path) == {"k": "x" * 500}
    monkeypatch.setattr(gguf_head, "_MAX_HEAD_BYTES", 400)
    with pytest.raises(CheckpointError, match="truncated or malformed: 500 bytes wanted"):
        read_gguf_metadata(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.gguf cannot be read"):
        read_gguf_metadata(tmp_path / "none.gguf")


def test_every_truncation_of_a_head_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "whole.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_token_list(list("abcdefgh"))
    writer.add_token_scores([0.5] * 8)
    writer.add_string("last", "one")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    end = path.read_bytes().rindex(b"one") + 3
    whole = path.read_bytes()[:end]
    assert len(read_gguf_metadata(path)) == 4
    for size in range(end):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            read_gguf_metadata(path)


def test_all_kinds_of_values_are_read(tmp_path: Path) -> None:
    body = b"".join(
        _string(name) + struct.pack("<I", kind) + value
        for name, kind, value in [
            (b"u8", 0, b"\xff"), (b"i8", 1, b"\xff"), (b"u16", 2, b"\xff\xff"), (b"i16", 3, b"\xff\xff"),
            (b"u32", 4, b"\xff" * 4), (b"i32", 5, b"\xff" * 4), (b"f32", 6, struct.pack("<f", 0.5)),
            (b"bool", 7, b"\x01"), (b"str", 8, _string("é".encode())), (b"u64", 10, b"\xff" * 8),
            (b"i64", 11, b"\xff" * 8), (b"f64", 12, struct.pack("<d", 0.25)),
            (b"ints", 9, struct.pack("<IQ3i", 5, 3, -1, 0, 1)), (b"none", 9, struct.pack("<IQ", 8, 0)),
            (b"strs", 9, struct.pack("<IQ", 8, 2) + _string(b"a") + _string(b"\xe2\x82")),
        ]
    )  # fmt: skip
    path = tmp_path / "values.gguf"
    path.write_bytes(_head(15, body))
    assert read_gguf_metadata(path) == {
        "u8": 255, "i8": -1, "u16": 65535, "i16": -1, "u32": 2**32 - 1, "i32": -1, "f32": 0.5, "bool": True,
        "str": "é", "u64": 2**64 - 1, "i64": -1, "f64": 0.25, "ints": [-1, 0, 1], "none": [],
        "strs": ["a", "\ufffd"],
    }  # fmt: skip


def test_long_arrays_are_kept_or_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    tokens, scores, last = [f"token {i}" for i in range(4097)], [float(i) for i in range(4097)], [1] * 4096
    writer = GGUFWriter(path, "llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_array("last", last)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    whole, settings = read_gguf_metadata(path), read_gguf(path).metadata
    assert (whole["tokenizer.ggml.tokens"], whole["tokenizer.ggml.scores"]) == (tokens, scores)
    assert settings["tokenizer.ggml.tokens"] == settings["tokenizer.ggml.scores"] == SkippedArray(4097)
    assert whole["last"] == settings["last"] == last


def test_a_real_file_is_read_as_the_public_package_reads_it(demo_model: Path) -> None:
    fields = gguf.GGUFReader(demo_model).fields
    metadata = read_gguf_metadata(demo_model)
    assert metadata.keys() == {name for name in fields if not name.startswith("GGUF.")}
    for name in metadata.keys() - {"tokenizer.ggml.tokens", "tokenizer.ggml.merges"}:
        assert metadata[name] == fields[name].contents(), name
    for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        values = metadata[name]
        assert isinstance(values, list)
        assert len(values) == len(fields[name].data)
        assert values[::997] == [fields[name].contents(i) for i in range(0, len(values), 997)]


# ---- names of parts


def test_the_first_part_tells_the_others() -> None:
    assert gguf_part_names("q4/m-00001-of-00003.gguf") == (
        "q4/m-00001-of-00003.gguf",
        "q4/m-00002-of-00003.gguf",
        "q4/m-00003-of-00003.gguf",
    )


@pytest.mark.parametrize(
    "name",
    [
        "m.gguf",
        "m-00001-of-00001.gguf",
        "m-00002-of-00003.gguf",
        "m-00001-of-00000.gguf",
        "m-00001-of-99999.gguf",
        "m-1-of-3.gguf",
        "-00001-of-00003.gguf",
        "m-00001-of-00003.safetensors",
    ],
)
def test_other_names_stand_for_themselves(name: str) -> None:
    assert gguf_part_names(name) == (name,)


# ---- JSON


def test_a_json_object(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"a": [1, "é"]}), encoding="utf-8")
    assert read_json_object(path) == read_optional_json_object(path) == {"a": [1, "é"]}
    assert read_optional_json_object(tmp_path / "none.json") == {}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[]", "does not hold a JSON object"),
        (b" " * 101, "too large"),
        (None, "has no x.json"),
    ],
)
def test_broken_json_gives_one_clear_error(
    content: bytes | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    if problem == "too large":
        monkeypatch.setattr(json_file, "MAX_JSON_BYTES", 100)
    with pytest.raises(ConfigError, match=problem) as caught:
        read_json_object(path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_refused_unopened(make: Callable[[Path], None], tmp_path: Path) -> None:
    """Opening a pipe would wait for its writer for ever."""
    path = tmp_path / "x"
    make(path)
    for read, problem in ((read_json_object, ConfigError), (read_gguf_metadata, CheckpointError)):
        with pytest.raises(problem, match="x is no regular file"):
            read(path)
