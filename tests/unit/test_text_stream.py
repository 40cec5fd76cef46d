"""One answer's text from its tokens: whatever the pushes, the same text, cut at the same token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.text import Delta, OutputText, StopSet, TextTokenizer
from tests.unit.test_text_stops import first_match, longest_start
from tests.unit.text_tools import byte_tokenizer, cuts, sentencepiece_tokenizer, texts

# Bytes, some words that straddle stop strings, and a special token.
WORDS = ["ab", ".a", "b.ab", "<|", "end", "|>", "日", "👍🏽!"]
TOKENIZER = byte_tokenizer(extra=WORDS, special=["<|special|>"])
SPECIAL = TOKENIZER.vocab_size - 1
WORD = {word: 256 + i for i, word in enumerate(WORDS)}


class Result(NamedTuple):
    text: str
    n_tokens: int
    stop: str | None


def run(output: OutputText, pushes: Sequence[Sequence[int]]) -> Result:
    text, n_tokens = "", 0
    for ids in pushes:
        delta = output.push(ids)
        text, n_tokens = text + delta.text, n_tokens + delta.n_tokens_used
        if delta.matched_stop is not None:
            return Result(text, n_tokens, delta.matched_stop)
    return Result(text + output.finish().text, n_tokens, None)


def expected(
    tokenizer: TextTokenizer, ids: Sequence[int], stops: list[str], min_tokens: int, include_stop: bool
) -> Result:
    """By decoding all tokens so far, anew for every token."""

    def whole(n: int) -> str:
        raw = b"".join(b"" if i in tokenizer.special_ids else tokenizer.token_bytes(i) for i in ids[:n])
        # Bytes that can still become a character are not text yet.
        for held in range(min(4, len(raw) + 1)):
            tail = raw[len(raw) - held :]
            if held and _may_continue(tail):
                return raw[: len(raw) - held].decode("utf-8", "replace")
        return raw.decode("utf-8", "replace")

    early = len(whole(min(min_tokens, len(ids))))
    for n in range(min_tokens + 1, len(ids) + 1):
        match = first_match(whole(n), stops, after=early)
        if match is not None:
            stop, end = match
            return Result(whole(n)[: end if include_stop else end - len(stop)], n, stop)
    raw = b"".join(b"" if i in tokenizer.special_ids else tokenizer.token_bytes(i) for i in ids)
    return Result(raw.decode("utf-8", "replace"), len(ids), None)


def _may_continue(tail: bytes) -> bool:
    """Whether some further bytes make exactly one character of it."""
    try:
        tail.decode()
    except UnicodeDecodeError as error:
        return error.start == 0 and error.end == len(tail) and "unexpected end" in error.reason
    return False


tokens = st.lists(
    st.one_of(
        st.sampled_from([*WORD.values(), SPECIAL, *b"ab."]),
        st.integers(0, 255),
    ),
    max_size=40,
)
text_tokens = st.one_of(tokens, texts.map(lambda text: list(text.encode())))
stop_strings = st.lists(
    st.one_of(
        st.text("ab.", min_size=1, max_size=5),
        st.sampled_from(["<|end|>", "日", "👍", "🏽", "\ufffd", "|>a", "é"]),
    ),
    max_size=5,
)


@given(st.data(), text_tokens, stop_strings, st.integers(0, 12), st.booleans())
def test_every_split_gives_the_same_answer(
    data: st.DataObject, ids: list[int], stops: list[str], min_tokens: int, include_stop: bool
) -> None:
    output = OutputText(TOKENIZER, StopSet(stops), include_stop=include_stop, min_tokens=min_tokens)
    assert run(output, data.draw(cuts(ids))) == expected(TOKENIZER, ids, stops, min_tokens, include_stop)


@given(st.data(), tokens)
def test_without_stop_strings_all_text_comes(data: st.DataObject, ids: list[int]) -> None:
    for stops in (None, StopSet([])):
        result = run(OutputText(TOKENIZER, stops), data.draw(cuts(ids)))
        assert result == Result(TOKENIZER.decode(ids, skip_special_tokens=True), len(ids), None)


@given(st.lists(st.sampled_from([*WORD.values(), *b"ab."]), max_size=40), stop_strings)
def test_only_what_could_become_a_stop_string_is_held(ids: list[int], stops: list[str]) -> None:
    output = OutputText(TOKENIZER, StopSet(stops))
    released = ""
    for n, token_id in enumerate(ids):
        delta = output.push([token_id])
        if delta.matched_stop is not None:
            return
        released += delta.text
        text = TOKENIZER.decode(ids[: n + 1])
        assert released == text[: len(text) - longest_start(text, stops)]


def push_all(stops: list[str], ids: list[int], **options: object) -> Delta:
    return OutputText(TOKENIZER, StopSet(stops), **options).push(ids)  # type: ignore[arg-type]


def test_tokens_after_the_one_that_completes_a_stop_string_do_not_count() -> None:
    ids = [*b"hello ", WORD["<|"], WORD["end"], WORD["|>"], *b"leaked"]
    assert push_all(["<|end|>"], ids) == Delta("hello ", 9, "<|end|>")
    assert push_all(["<|end|>"], ids, include_stop=True) == Delta("hello <|end|>", 9, "<|end|>")


def test_the_rest_of_the_completing_token_is_dropped() -> None:
    ids = [*b"x", WORD["b.ab"], *b"y"]
    assert push_all(["b."], ids) == Delta("x", 2, "b.")
    assert push_all(["b."], ids, include_stop=True) == Delta("xb.", 2, "b.")


def test_a_stop_string_within_the_first_min_tokens_is_passed_over() -> None:
    ids = list(b"ab-ab-")
    assert push_all(["ab"], ids, min_tokens=2) == Delta("ab-", 5, "ab")
    assert push_all(["ab"], ids, min_tokens=1) == Delta("", 2, "ab")
    assert push_all(["ab"], ids, min_tokens=6) == Delta("ab-ab-", 6)


def test_a_beginning_of_a_stop_string_is_released_at_the_end() -> None:
    output = OutputText(TOKENIZER, StopSet(["STOP"]))
    assert output.push(list(b"go STO")) == Delta("go ", 6)
    assert output.finish() == Delta("STO", 0)


def test_a_stop_token_is_shown_only_on_request() -> None:
    for include_stop, text in ((False, "hi"), (True, "hi<|special|>")):
        output = OutputText(TOKENIZER, include_stop=include_stop)
        assert output.push(list(b"hi")).text + output.finish(SPECIAL).text == text


def test_an_ordinary_token_that_stops_is_shown_only_on_request() -> None:
    for include_stop, text in ((False, "hiS"), (True, "hiSend")):
        output = OutputText(TOKENIZER, StopSet(["STOP"]), include_stop=include_stop)
        assert output.push(list(b"hiS")).text + output.finish(WORD["end"]).text == text


def test_special_tokens_on_the_way_have_no_text() -> None:
    ids = [*b"a", SPECIAL, *b"b"]
    assert OutputText(TOKENIZER).push(ids) == Delta("ab", 3)


def test_a_leading_space_is_kept_after_a_prompt() -> None:
    pieces = sentencepiece_tokenizer()
    assert OutputText(pieces).push([257, 257]).text == " the the"


def test_one_stop_set_serves_many_answers() -> None:
    stops = StopSet(["ab"])
    first, second = OutputText(TOKENIZER, stops), OutputText(TOKENIZER, stops)
    assert first.push([*b"xa"]).text == "x"
    assert second.push([*b"b"]) == Delta("b", 1)
    assert first.push([*b"b"]) == Delta("", 1, "ab")


@pytest.mark.parametrize("n_tokens", [1, 3])
def test_an_empty_push_changes_nothing(n_tokens: int) -> None:
    output = OutputText(TOKENIZER, StopSet(["abc"]), min_tokens=1)
    assert output.push([]) == Delta("", 0)
    output.push([*b"xyz"][:n_tokens])
    assert output.push([]) == Delta("", 0)
