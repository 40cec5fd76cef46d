"""The head of GGUF files: every kind of value, and files that lie."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from service.text import TokenizerError, load_tokenizer
from service.text.gguf_metadata import read_gguf_metadata
from tests.unit.text_tools import write_gguf


def header(n_keys: int, body: bytes = b"", version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, 0, n_keys) + body


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


KEY = string(b"k")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be read"),
        (b"GG", "ends too early"),
        (b"ELF\x7f" + bytes(100), "magic"),
        (header(0, version=1), "version 1"),
        (header(0, version=3 << 24), "version"),
        (header(2**63), "more than its bytes can hold"),
        (header(1), "more than its bytes can hold"),
        (header(1, KEY + struct.pack("<I", 8) + struct.pack("<Q", 2**64 - 1)), "ends too early"),
        (header(1, KEY + struct.pack("<I", 99) + bytes(16)), "value type 99"),
        (header(1, KEY + struct.pack("<IIQ", 9, 8, 2**60) + bytes(16)), "more than its bytes can hold"),
        (header(1, KEY + struct.pack("<IIQ", 9, 4, 2**62) + bytes(16)), "more than its bytes can hold"),
        (header(1, KEY + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9 + bytes(99)), "nested too deep"),
        (header(0), "tokenizer.ggml.tokens is missing"),
    ],
)
def test_hostile_and_truncated_files_give_one_clear_error(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(path)


def test_every_truncation_of_a_file_is_noticed(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", list('abcdefgh'), merges=[("a", "b")]).read_bytes()
    path = tmp_path / "part.gguf"
    for size in range(len(whole) - 16):  # the writer pads the end
        path.write_bytes(whole[:size])
        with pytest.raises(TokenizerError):
            load_tokenizer(path)


def test_all_kinds_of_values_are_read(tmp_path: Path) -> None:
    body = b"".join(
        string(name) + struct.pack("<I", kind) + value
        for name, kind, value in [
            (b"u8", 0, b"\xff"), (b"i8", 1, b"\xff"), (b"u16", 2, b"\xff\xff"), (b"i16", 3, b"\xff\xff"),
            (b"u32", 4, b"\xff" * 4), (b"i32", 5, b"\xff" * 4), (b"f32", 6, struct.pack("<f", 0.5)),
            (b"bool", 7, b"\x01"), (b"str", 8, string("é".encode())), (b"u64", 10, b"\xff" * 8),
            (b"i64", 11, b"\xff" * 8), (b"f64", 12, struct.pack("<d", 0.25)),
            (b"ints", 9, struct.pack("<IQ3i", 5, 3, -1, 0, 1)),
            (b"strs", 9, struct.pack("<IQ", 8, 2) + string(b"a") + string(b"\xe2\x82")),
            (b"nested", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ2B", 0, 2, 7, 8)),
        ]
    )  # fmt: skip
    path = tmp_path / "values.gguf"
    path.write_bytes(header(15, body))
    assert read_gguf_metadata(path) == {
        "u8": 255, "i8": -1, "u16": 65535, "i16": -1, "u32": 2**32 - 1, "i32": -1, "f32": 0.5, "bool": True,
        "str": "é", "u64": 2**64 - 1, "i64": -1, "f64": 0.25, "ints": [-1, 0, 1], "strs": ["a", "\ufffd"],
        "nested": [[7, 8]],
    }  # fmt: skip
