"""A request and its answers, as the scheduler keeps track of them. Plain state; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from engine.interface import PAGE_SIZE, IntArray, Sampling, TokenLogprobs
from worker.pages import page_digest, root_digest

if TYPE_CHECKING:
    from worker.scheduling.news import FrontNews

NO_SLOT = -1

Rank = tuple[int, bool, int, int]
"""(−priority, whether new rather than resubmitted, arrival, answer): the lesser goes first, and the
greatest is the first to be preempted."""


class State(Enum):
    """Where a sequence is."""

    WAITING = auto()
    """In line for a slot: new, preempted, or resumed."""
    PREFILLING = auto()
    """Holds a slot and all pages of its known tokens; some of these are still to be run."""
    DECODING = auto()
    """Holds a slot; all known tokens are in steps, and every step gives one more."""
    ENDING = auto()
    """Its last token is in a step under way; holds nothing any more."""
    PAUSED = auto()
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class Request:
    """What its answers have in common."""

    request_id: str
    prompt: IntArray
    """int32 [n_prompt]."""
    priority: int
    arrival: int
    """Counts requests."""
    cache_salt: str
    submitted_at: float
    deadline: float | None
    live: list[Sequence] = field(default_factory=list)
    """Answers that have not finished."""
    _prompt_digests: list[bytes] | None = None

    def prompt_digests(self) -> list[bytes]:
        """Of the root and of every full page of the prompt; computed once, for all answers."""
        if self._prompt_digests is None:
            digests = [root_digest(self.cache_salt)]
            for end in range(PAGE_SIZE, len(self.prompt) + 1, PAGE_SIZE):
                digests.append(page_digest(digests[-1], self.prompt[end - PAGE_SIZE : end]))
            self._prompt_digests = digests
        return self._prompt_digests


@dataclass(eq=False, slots=True)
class Sequence:
    """One answer in the making."""

    request: Request
    key: int
    sampling: Sampling
    max_tokens: int
    news: FrontNews
    """Where its tokens go."""
    rank: Rank
    output: list[int]
    """Tokens collected, resubmitted ones included."""
    state: State = State.WAITING

    # While it waits.
    ready_after: int = -1
    """The last step that may still give it a token: it cannot start before that is collected."""
    parked_on: bytes | None = None
    """The digest of a page that another sequence is computing and that this one will share."""

    # While it holds a slot.
    slot: int = NO_SLOT
    pages: list[int] = field(default_factory=list)
    """Its block table."""
    room: int = 0
    """Tokens for which it has pages."""
    tokens: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """All that were known at its start: what prefill runs."""
    n_computed: int = 0
    """Positions whose KV is cached or in a step: the next position to run."""
    n_planned: int = 0
    """Output tokens collected or in a step."""
    n_published: int = 0
    """Pages that came from the prefix cache or were registered with it."""

    # Over its life.
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Collected so far, where asked for; None again once delivered."""
    cached_tokens: int = 0
    """Found in the prefix cache at the first start."""
    n_shared_pages: int = 0
    """Pages of its present or last block table that it found rather than computed."""
    preemptions: int = 0
    started_at: float | None = None
    has_spoken: bool = False
    """Whether it has given a new token (resubmitted ones do not count)."""
    _digests: list[bytes] | None = None

    @property
    def n_known(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.request.prompt) + len(self.output)

    def known_tokens(self) -> IntArray:
        """Prompt and output so far, int32 [n_known]."""
        if not self.output:
            return self.request.prompt
        return np.concatenate((self.request.prompt, np.array(self.output, np.int32)))

    def digests(self, n_pages: int) -> list[bytes]:
        """Of its first pages, at most `n_pages`, all of which must be full of known tokens."""
        if self._digests is None:
            self._digests = self.request.prompt_digests().copy()
        digests = self._digests
        if len(digests) <= n_pages:
            first = len(digests) - 1
            tokens = self._tokens_between(first * PAGE_SIZE, n_pages * PAGE_SIZE)
            for start in range(0, len(tokens), PAGE_SIZE):
                digests.append(page_digest(digests[-1], tokens[start : start + PAGE_SIZE]))
        return digests[1 : n_pages + 1]

    def start_sampling(self) -> Sampling:
        """How to sample from here on: prompt log-probabilities only if they are still to be delivered."""
        if self.sampling.prompt_logprobs is not None and self.prompt_logprobs is None:
            return replace(self.sampling, prompt_logprobs=None)
        return self.sampling

    def _tokens_between(self, start: int, end: int) -> IntArray:
        n_prompt = len(self.request.prompt)
        output = self.output[max(0, start - n_prompt) : max(0, end - n_prompt)]
        return np.concatenate((self.request.prompt[start:end], np.array(output, np.int32)))
