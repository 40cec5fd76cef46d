"""The automaton that finds stop strings, against a search by brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.text.stops import StopMatcher, StopSet
from tests.unit.text_tools import cuts

# Few letters, so that stop strings overlap, nest and nearly match all the time.
dense = st.text("ab.", max_size=40)
stop_lists = st.lists(st.text("ab.", min_size=1, max_size=6), max_size=6)


def first_match(text: str, stops: list[str], after: int = 0) -> tuple[str, int] | None:
    """Complete first; of those, the longest. Only matches that end beyond `after` count."""
    for end in range(after + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return max(ending, key=len), end
    return None


def longest_start(text: str, stops: list[str]) -> int:
    """Length of the text's longest end that is a beginning of a stop string, though not a whole one."""
    return max(
        (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
        default=0,
    )


@given(st.data(), dense, stop_lists)
def test_finds_what_brute_force_finds(data: st.DataObject, text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopSet(stops))
    expected = first_match(text, stops)
    done = 0
    for piece in data.draw(cuts(text)):
        match = matcher.push(piece)
        if match is not None:
            assert (match.stop, done + match.end) == expected
            return
        done += len(piece)
        assert matcher.held() == longest_start(text[:done], stops)
    assert expected is None


@given(st.data(), dense, dense, stop_lists)
def test_matches_in_text_that_may_not_match_are_passed_over(
    data: st.DataObject, early: str, late: str, stops: list[str]
) -> None:
    matcher = StopMatcher(StopSet(stops))
    for piece in data.draw(cuts(early)):
        assert matcher.push(piece, may_match=False) is None
    assert matcher.held() == longest_start(early, stops)
    expected = first_match(early + late, stops, after=len(early))
    match = matcher.push(late)
    found = None if match is None else (match.stop, len(early) + match.end)
    assert found == expected


@pytest.mark.parametrize(
    ("stops", "text", "stop", "end"),
    [
        (["abc", "b"], "xabc", "b", 3),
        (["bc", "abc"], "xabc", "abc", 4),
        (["a", "aa"], "aa", "a", 1),
        (["\n\nUser:"], "hi\n\n\nUser: x", "\n\nUser:", 10),
        (["👩‍👩‍👧"], "👩👩‍👩‍👧", "👩‍👩‍👧", 6),
        (["日本"], "日日本", "日本", 3),
        (["]", "^", "-", "\\"], "ab\\", "\\", 3),
        (["a.c"], "abca.c", "a.c", 6),
    ],
)
def test_examples(stops: list[str], text: str, stop: str, end: int) -> None:
    match = StopMatcher(StopSet(stops)).push(text)
    assert match is not None
    assert (match.stop, match.end) == (stop, end)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopSet(["a", ""])


def test_no_stop_strings_is_nothing_to_look_for() -> None:
    stops = StopSet([])
    assert not stops
    assert StopMatcher(stops).push("anything") is None


def test_a_stop_string_given_twice_is_one() -> None:
    match = StopMatcher(StopSet(["ab", "ab"])).push("xab")
    assert match is not None
    assert match.end == 3


class _Counted(StopSet):
    """Counts the states it goes through."""

    __slots__ = ("visits",)

    def __init__(self, stops: list[str]) -> None:
        self.visits = 0
        super().__init__(stops)
        self.visits = 0

    def _child(self, state: int, char: str) -> int:
        self.visits += 1
        return super()._child(state, char)


@pytest.mark.parametrize("cut", [1, 7, 10_000])
def test_work_is_linear_on_text_made_to_be_slow(cut: int) -> None:
    """64 stop strings of 1,024 characters that the text keeps almost completing."""
    stops = _Counted(["a" * (1023 - i) + "b" for i in range(64)])
    text = "a" * 20_000
    matcher = StopMatcher(stops)
    for at in range(0, len(text), cut):
        assert matcher.push(text[at : at + cut]) is None
    # Each character goes one state deeper, and can only be made to go back as often as forward.
    assert stops.visits <= 2 * len(text)
    assert matcher.held() == 1023


def test_text_without_a_first_character_is_skipped() -> None:
    stops = _Counted(["<|end|>", "STOP"])
    assert StopMatcher(stops).push("nothing of interest here " * 100) is None
    assert stops.visits == 0
