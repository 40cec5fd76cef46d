"""Stop strings over a stream of text: found as soon as complete, whatever the text's pieces.

An Aho–Corasick automaton: one state says both which stop string is complete and how much of the text's
end could still become one, and each character costs a bounded number of steps on average. Most text holds
no first character of a stop string, and is skipped by a compiled search.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_NO_CHAR = "\ud800"
"""Follows a state that nothing follows: half a surrogate pair, which no decoded text holds."""

_NONE = -1


class StopSet:
    """Immutable, made once a request and shared by its n answers.

    States are numbered 0 (nothing matched) upwards. The first character that follows a state leads to the
    next number, so that a stop string is a run of states and only forks need a table. 64 strings of 1,024
    characters are 65,536 states: 1.2 MB, made in ~50 ms.
    """

    __slots__ = ("_depth", "_fail", "_forks", "_found", "_held", "_next_char", "_stops", "first_char")

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty string. No strings at all is fine."""
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._depth = array("i", [0])
        self._found = array("i", [_NONE])
        self._forks: dict[tuple[int, str], int] = {}
        self._next_char: str | list[str] = self._build()
        self._fail = array("i", bytes(4 * len(self._depth)))
        self._held = array("i", bytes(4 * len(self._depth)))
        self._link()
        firsts = "".join(sorted({re.escape(stop[0]) for stop in stops}))
        self.first_char = re.compile(f"[{firsts}]") if firsts else None

    def __bool__(self) -> bool:
        """Whether there is anything to look for."""
        return self.first_char is not None

    def _child(self, state: int, char: str) -> int:
        """The state one character deeper, or 0."""
        if self._next_char[state] == char:
            return state + 1
        return self._forks.get((state, char), 0)

    def _build(self) -> str:
        """States, depths and forks of all stop strings; returns the characters that lead on."""
        self._next_char = next_char = [_NO_CHAR]
        for number, stop in enumerate(self._stops):
            state = at = 0
            while at < len(stop) and (child := self._child(state, stop[at])):
                state, at = child, at + 1
            if at < len(stop):
                state = self._append(next_char, state, stop[at:])
            if self._found[state] == _NONE:
                self._found[state] = number
        return "".join(next_char)

    def _append(self, next_char: list[str], parent: int, tail: str) -> int:
        """A run of new states below `parent`; returns the last."""
        first = len(next_char)
        if first == parent + 1 and next_char[parent] == _NO_CHAR:
            next_char[parent] = tail[0]
        else:
            self._forks[parent, tail[0]] = first
        next_char.extend(tail[1:])
        next_char.append(_NO_CHAR)
        depth = self._depth[parent]
        self._depth.extend(range(depth + 1, depth + len(tail) + 1))
        self._found.extend([_NONE] * len(tail))
        return len(next_char) - 1

    def _children(self) -> Iterator[tuple[int, str, int, bool]]:
        """(parent, character, child, whether the child has children), less deep ones first."""
        forks: dict[int, list[tuple[str, int]]] = {}
        for (parent, char), child in self._forks.items():
            forks.setdefault(parent, []).append((char, child))
        next_char = self._next_char
        level = [0]
        while level:
            deeper: list[int] = []
            for parent in level:
                char = next_char[parent]
                children = [] if char == _NO_CHAR else [(char, parent + 1)]
                for char, child in [*children, *forks[parent]] if parent in forks else children:
                    deeper.append(child)
                    yield parent, char, child, next_char[child] != _NO_CHAR or child in forks
            level = deeper

    def _link(self) -> None:
        """For each state: the longest shorter state that ends the same way; what is complete there; how
        many characters of the text's end could still become a stop string."""
        fail, found, held, depth = self._fail, self._found, self._held, self._depth
        next_char, forks = self._next_char, self._forks
        for parent, char, child, leads_on in self._children():
            shorter, state = 0, parent
            while shorter == 0 and state != 0:  # step(), spelled out: half the time of making a large set
                state = fail[state]
                shorter = state + 1 if next_char[state] == char else forks.get((state, char), 0)
            fail[child] = shorter
            if found[child] == _NONE:
                found[child] = found[shorter]
            held[child] = depth[child] if leads_on else held[shorter]

    def step(self, state: int, char: str) -> int:
        """The state after one more character of text."""
        child = self._child(state, char)
        while child == 0 and state != 0:
            state = self._fail[state]
            child = self._child(state, char)
        return child

    def found(self, state: int) -> str | None:
        """The longest stop string that ends here."""
        number = self._found[state]
        return None if number == _NONE else self._stops[number]

    def held(self, state: int) -> int:
        """How many of the text's last characters could still become a stop string."""
        return self._held[state]


class Match(NamedTuple):
    """A stop string in the pushed text."""

    stop: str
    end: int
    """Where it ends, in characters from the start of the text pushed last; at least 1."""


@dataclass(slots=True)
class StopMatcher:
    """Where one answer stands among the stop strings."""

    stops: StopSet
    state: int = 0

    def push(self, text: str, *, may_match: bool = True) -> Match | None:
        """Goes on through text, up to the first stop string that is complete.

        Complete first wins; of those complete at the same character, the longest. Without may_match, stop
        strings complete within this text do not count.
        """
        stops, state = self.stops, self.state
        first_char = stops.first_char
        if first_char is None:
            return None
        at, size = 0, len(text)
        while at < size:
            if state == 0:
                hit = first_char.search(text, at)
                if hit is None:
                    break
                at = hit.start()
            state = stops.step(state, text[at])
            at += 1
            if may_match:
                found = stops.found(state)
                if found is not None:
                    self.state = state
                    return Match(found, at)
        self.state = state
        return None

    def held(self) -> int:
        """How many of the last characters pushed could still become a stop string."""
        return self.stops.held(self.state)
