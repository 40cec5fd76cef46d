"""Tokens to text: equal to decoding everything at once, for every split, and nothing held too long."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.text.detokenizer import Detokenizer
from tests.unit.text_tools import byte_tokenizer, cuts, sentencepiece_tokenizer, texts

BYTES = byte_tokenizer(extra=["\u00e9!", "日"])
SPECIAL = BYTES.vocab_size - 1
PIECES = sentencepiece_tokenizer()


def stream(detokenizer: Detokenizer, pushes: Sequence[Sequence[int]]) -> str:
    return "".join([*(detokenizer.push(ids) for ids in pushes), detokenizer.finish()])


@given(st.data(), texts)
def test_text_survives_every_split_of_its_bytes(data: st.DataObject, text: str) -> None:
    pushes = data.draw(cuts(list(text.encode())))
    assert stream(Detokenizer(BYTES), pushes) == text


@given(st.data(), st.binary(max_size=40), texts)
def test_any_bytes_decode_as_at_once(data: st.DataObject, noise: bytes, text: str) -> None:
    mixed = data.draw(st.permutations([noise, text.encode(), noise[:1], b"\xe2\x82", b"\xf0\x9f"]))
    ids = list(b"".join(mixed))
    pushes = data.draw(cuts(ids))
    assert stream(Detokenizer(BYTES), pushes) == bytes(ids).decode("utf-8", "replace")


@given(st.data(), st.lists(st.integers(0, PIECES.vocab_size + 3), max_size=30))
def test_byte_fallback_tokens_decode_as_at_once(data: st.DataObject, ids: list[int]) -> None:
    raw = b"".join(PIECES.token_bytes(i) for i in ids)
    pushes = data.draw(cuts(ids))
    detokenizer = Detokenizer(PIECES)
    assert stream(detokenizer, pushes) == raw.decode("utf-8", "replace")


@given(texts)
def test_nothing_is_held_but_the_bytes_of_one_unfinished_character(text: str) -> None:
    detokenizer = Detokenizer(BYTES)
    released, fed = "", b""
    for byte in text.encode():
        released += detokenizer.push([byte])
        fed += bytes([byte])
        assert released == fed.decode("utf-8", "ignore")


@pytest.mark.parametrize(
    ("data", "at_once"),
    [
        (b"\xc3", ""),
        (b"\xf0\x9f\x91", ""),
        (b"\xc3\x28", "\ufffd("),
        (b"\x80", "\ufffd"),
        # The beginning of a surrogate never becomes a character, but Python decides so a byte later.
        (b"\xed\xa0", ""),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
        (b"\xf4\x90", "\ufffd\ufffd"),
        (b"\xc0", "\ufffd"),
        (b"a\xe2\x82\xac", "a€"),
    ],
)
def test_bytes_that_cannot_become_a_character_are_replaced_at_once(data: bytes, at_once: str) -> None:
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push(list(data)) == at_once
    assert at_once + detokenizer.finish() == data.decode("utf-8", "replace")


def test_the_end_of_the_text_flushes_an_unfinished_character_once() -> None:
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push([0xE2, 0x82]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_special_tokens_have_no_text_and_do_not_break_a_character() -> None:
    assert stream(Detokenizer(BYTES), [[SPECIAL, 0xC3, SPECIAL], [0xA9, SPECIAL]]) == "é"


def test_added_tokens_stand_for_their_own_text() -> None:
    assert Detokenizer(BYTES).push([256, 257]) == "é!日"


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert Detokenizer(BYTES).push([0x41, 50_000, 0x42]) == "AB"


def test_token_id_zero_is_a_token() -> None:
    assert Detokenizer(BYTES).push([0]) == "\x00"


def test_a_leading_space_is_kept() -> None:
    the = 257
    assert Detokenizer(PIECES).push([the, the]) == " the the"


def test_each_token_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear: the bytes handed to the decoder add up to the bytes of the tokens, plus what was pending."""
    handed = 0
    original = Detokenizer.push_bytes

    def counted(self: Detokenizer, data: bytes) -> str:
        nonlocal handed
        handed += len(data) + len(self.mark())
        return original(self, data)

    monkeypatch.setattr(Detokenizer, "push_bytes", counted)
    text = "é日👍a" * 2_000
    ids = list(text.encode())
    detokenizer = Detokenizer(BYTES)
    assert "".join(detokenizer.push([i]) for i in ids) == text
    assert handed <= 4 * len(ids)
