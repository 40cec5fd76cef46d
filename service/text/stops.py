"""Stop strings over a stream of text: found as soon as complete, whatever the text's pieces.

An Aho–Corasick automaton: one state says both which stop string is complete and how much of the text's
end could still become one, and each character costs a bounded number of steps on average. Most text holds
no first character of a stop string, and is skipped by a compiled search.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class StopSet:
    """Immutable, made once a request and shared by its n answers.

    States are numbered 0 (nothing matched) upwards. The first character that follows a state leads to the
    next number, so a stop string is a run of states; only forks need a table. 64 strings of 1,024
    characters are 65,536 states in some 5 MB, made in ~50 ms.
    """

    __slots__ = ("_depth", "_fail", "_forks", "_found", "_held", "_next_char", "first_char")

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty string. No strings at all is fine."""
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._next_char: list[str] = [""]
        self._depth: list[int] = [0]
        self._found: list[str | None] = [None]
        self._forks: dict[tuple[int, str], int] = {}
        for stop in stops:
            self._add(stop)
        self._fail: list[int] = [0] * len(self._depth)
        self._held: list[int] = [0] * len(self._depth)
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

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            child = self._child(state, char)
            if child == 0:
                child = self._new_state(state, char)
            state = child
        self._found[state] = stop

    def _new_state(self, parent: int, char: str) -> int:
        child = len(self._depth)
        if child == parent + 1 and self._next_char[parent] == "":
            self._next_char[parent] = char
        else:
            self._forks[parent, char] = child
        self._next_char.append("")
        self._depth.append(self._depth[parent] + 1)
        self._found.append(None)
        return child

    def _edges(self) -> list[tuple[int, str, int]]:
        """(parent, character, child), parents less deep first."""
        edges = [(s, c, s + 1) for s, c in enumerate(self._next_char) if c]
        edges += [(parent, char, child) for (parent, char), child in self._forks.items()]
        edges.sort(key=lambda edge: self._depth[edge[0]])
        return edges

    def _link(self) -> None:
        """For each state: the longest shorter state that ends the same way; what is complete there; how
        many characters of the text's end could still become a stop string."""
        edges = self._edges()
        for parent, char, child in edges:
            if parent != 0:
                self._fail[child] = self.step(self._fail[parent], char)
            if self._found[child] is None:
                self._found[child] = self._found[self._fail[child]]
        has_child = {parent for parent, _, _ in edges}
        for _, _, child in edges:
            self._held[child] = self._depth[child] if child in has_child else self._held[self._fail[child]]

    def step(self, state: int, char: str) -> int:
        """The state after one more character of text."""
        child = self._child(state, char)
        while child == 0 and state != 0:
            state = self._fail[state]
            child = self._child(state, char)
        return child

    def found(self, state: int) -> str | None:
        """The longest stop string that ends here."""
        return self._found[state]

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
