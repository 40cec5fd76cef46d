"""How long a prefill chunk should be, and how several prompts share a step's budget."""

from __future__ import annotations

from dataclasses import dataclass

from engine.interface import PAGE_SIZE
from worker.sequence import Sequence

_SMALLEST_SHARE = 8
"""Sharing stops at this fraction of the budget: many slivers finish later, all of them, than a few
chunks one after the other."""


def chunk_length(start: int, end: int, limit: int) -> int:
    """Tokens to run of start … end − 1: all if the limit allows, else up to a page's end; maybe none.

    A chunk that ends inside a page leaves a ragged rest for later and shares nothing; so a limit that
    does not reach the page's end gives 0.
    """
    if end - start <= limit:
        return end - start
    return max(0, (start + limit) // PAGE_SIZE * PAGE_SIZE - start)


@dataclass(slots=True)
class Chunk:
    """Tokens of one sequence for the step being planned."""

    sequence: Sequence
    length: int


class ChunkBudget:
    """Deals out a step's prefill tokens among prompts, which come in order of rank.

    The first takes all it needs up to half of what there is, the next up to half of the rest, and so
    on. So a long prompt does not keep a short one behind it waiting, while prompts of equal length
    still finish nearly one by one, which is the least waiting on the whole. What nobody behind takes
    goes back to the first ones. A lower priority gets only what the higher ones leave.
    """

    def __init__(self, tokens: int) -> None:
        self.chunks: list[Chunk] = []
        self.left = tokens
        self._share_floor = max(PAGE_SIZE, tokens // _SMALLEST_SHARE)
        self._first_of_level = 0

    def offer(self, start: int, end: int, priority: int) -> int:
        """How many tokens the next prompt, of positions start … end − 1, would get now."""
        if self.chunks and self.chunks[-1].sequence.request.priority != priority:
            self.top_up()
            self._first_of_level = len(self.chunks)
        length = chunk_length(start, end, min(self.left, max(self._share_floor, self.left // 2)))
        if length == 0 and not self.chunks:
            # Nothing else is to be prefilled: a crumb is better than standing still, since with a
            # budget this small no later step may have more.
            length = min(self.left, end - start)
        return length

    def take(self, sequence: Sequence, length: int) -> None:
        """Takes what was offered."""
        self.chunks.append(Chunk(sequence, length))
        self.left -= length

    def top_up(self) -> None:
        """What is left goes to those of the present priority that could use more."""
        for chunk in self.chunks[self._first_of_level :]:
            if self.left == 0:
                return
            sequence = chunk.sequence
            more = chunk_length(sequence.n_computed, len(sequence.tokens), chunk.length + self.left)
            if more > chunk.length:
                self.left -= more - chunk.length
                chunk.length = more
