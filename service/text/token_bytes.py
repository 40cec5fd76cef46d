"""What each token stands for, as raw bytes: the table all detokenizing is done with.

Knows the decoders of `tokenizers` (byte-level, byte-fallback, metaspace); refuses the ones whose text
depends on more than the tokens' own bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from service.text.errors import TokenizerError

METASPACE = "▁"
"""What SentencePiece writes for a space."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each of the 256 bytes: character to byte.

    Bytes that print as themselves in Latin-1 do; the others take the characters from U+0100 up, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    for index, byte in enumerate(sorted(set(range(256)) - printable)):
        alphabet[chr(256 + index)] = byte
    return alphabet


@dataclass(frozen=True, slots=True)
class ByteDecoder:
    """How a tokenizer's vocabulary entries turn into bytes."""

    to_bytes: Callable[[str], bytes]
    """Of an ordinary vocabulary entry."""
    added_to_bytes: Callable[[str], bytes]
    """Of an added token, which is matched in the text before all else."""
    strips_leading_space: bool = False
    """Whether one space at the very start of a text is not part of it."""


def _byte_level(alphabet: Mapping[str, int]) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in token])
        except KeyError:  # not written in the alphabet: stands for itself
            return token.encode()

    return to_bytes


def _replaced(token: str, replacements: Mapping[str, str]) -> bytes:
    for old, new in replacements.items():
        token = token.replace(old, new)
    return token.encode()


def _sentencepiece(replacements: Mapping[str, str], byte_fallback: bool) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        byte = _BYTE_TOKEN.match(token) if byte_fallback else None
        return bytes([int(byte[1], 16)]) if byte else _replaced(token, replacements)

    return to_bytes


BYTE_LEVEL = ByteDecoder(_byte_level(byte_level_alphabet()), str.encode)
"""Added tokens stand in plain text, not in the alphabet: "é" is an é, not the byte 0xE9."""


def sentencepiece_decoder(*, strips_leading_space: bool) -> ByteDecoder:
    """Spaces written as ▁, in added tokens too, and tokens <0x00> … <0xFF> for single bytes."""
    to_bytes = _sentencepiece({METASPACE: " "}, byte_fallback=True)
    return ByteDecoder(to_bytes, to_bytes, strips_leading_space)


def decoder_from_json(decoder: Mapping[str, Any] | None) -> ByteDecoder:
    """From the `decoder` entry of a tokenizer.json. Raises TokenizerError naming what is not supported."""
    if decoder is None:
        raise TokenizerError("The tokenizer has no decoder, so its tokens cannot be turned into text.")
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    replacements: dict[str, str] = {}
    byte_fallback = is_byte_level = strips = False
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                is_byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements[old] = new
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                strips = start == 1
            case {"type": "Metaspace", "replacement": str(mark)}:
                replacements[mark] = " "
                strips = step.get("prepend_scheme", "always") != "never"
            case _:
                raise TokenizerError(
                    f"The tokenizer's decoder {step.get('type', step)!r} is not supported; ByteLevel, "
                    "ByteFallback, Fuse, Metaspace, Replace and Strip of one leading space are."
                )
    if is_byte_level:
        if replacements or byte_fallback:
            raise TokenizerError("A decoder that mixes ByteLevel with replacements is not supported.")
        return ByteDecoder(BYTE_LEVEL.to_bytes, BYTE_LEVEL.added_to_bytes, strips)
    to_bytes = _sentencepiece(replacements, byte_fallback)
    return ByteDecoder(to_bytes, to_bytes, strips)


def build_table(vocabulary: Mapping[str, int], added: Mapping[int, str], decoder: ByteDecoder) -> list[bytes]:
    """Bytes by token id, b"" for ids that no token has. `added` tokens may be in `vocabulary` too."""
    size = max([*vocabulary.values(), *added], default=-1) + 1
    table = [b""] * size
    to_bytes = decoder.to_bytes
    for token, token_id in vocabulary.items():
        table[token_id] = to_bytes(token)
    for token_id, text in added.items():
        table[token_id] = decoder.added_to_bytes(text)
    return table
