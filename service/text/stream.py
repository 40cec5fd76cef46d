"""One answer's tokens to text: detokenizing, special tokens, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from service.text.detokenizer import Detokenizer
from service.text.stops import Match, StopMatcher, StopSet
from service.text.tokenizer import TextTokenizer


class Delta(NamedTuple):
    """What pushed tokens add to an answer."""

    text: str
    """Text that is certain now: whole characters, and no beginning of a stop string."""
    n_tokens_used: int
    """Of the pushed tokens, those that belong to the answer: all, or, where a stop string is found,
    the ones up to and including the one that completes it."""
    matched_stop: str | None = None
    """The stop string that ends the answer. Nothing may be pushed after it."""


class OutputText:
    """One answer's text, from its tokens as they come.

    A stop string counts if its last character comes with a token after the first `min_tokens`. The one
    complete first wins; of those complete at the same character, the longest. The result does not depend
    on how the tokens are cut into pushes.
    """

    __slots__ = ("_detokenizer", "_held", "_include_stop", "_matcher", "_min_tokens_left", "_tokenizer")

    def __init__(
        self,
        tokenizer: TextTokenizer,
        stops: StopSet | None = None,
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops) if stops else None
        self._include_stop = include_stop
        self._min_tokens_left = min_tokens
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> Delta:
        """Adds tokens, any number at once. A stop token that ends the answer belongs in finish()."""
        if self._matcher is None:
            return Delta(self._detokenizer.push(token_ids), len(token_ids))
        n_early = min(self._min_tokens_left, len(token_ids))
        if n_early == 0:
            return self._push(token_ids, self._matcher)
        self._min_tokens_left -= n_early
        text = self._detokenizer.push(token_ids[:n_early])
        self._matcher.push(text, may_match=False)
        early = self._release(text, self._matcher)
        late = self._push(token_ids[n_early:], self._matcher)
        return Delta(early + late.text, n_early + late.n_tokens_used, late.matched_stop)

    def _push(self, token_ids: Sequence[int], matcher: StopMatcher) -> Delta:
        before = self._detokenizer.mark()
        text = self._detokenizer.push(token_ids)
        match = matcher.push(text)
        if match is None:
            return Delta(self._release(text, matcher), len(token_ids))
        self._detokenizer.rewind(before)
        return Delta(self._cut(text, match), self._tokens_needed(token_ids, match.end), match.stop)

    def _release(self, text: str, matcher: StopMatcher) -> str:
        """All text but the end that could still become a stop string."""
        if self._held:
            text = self._held + text
        n_held = matcher.held()
        if n_held == 0:
            self._held = ""
            return text
        self._held = text[-n_held:]
        return text[:-n_held]

    def _cut(self, text: str, match: Match) -> str:
        end = len(self._held) + match.end
        if not self._include_stop:
            end -= len(match.stop)
        released = (self._held + text)[:end]
        self._held = ""
        return released

    def _tokens_needed(self, token_ids: Sequence[int], n_chars: int) -> int:
        """How many of the tokens, pushed anew, bring the first n_chars characters of their text."""
        for i, token_id in enumerate(token_ids):
            n_chars -= len(self._detokenizer.push((token_id,)))
            if n_chars <= 0:
                return i + 1
        return len(token_ids)

    def finish(self, stop_token: int | None = None) -> Delta:
        """The answer is over: whatever was held back.

        `stop_token`: the token id that ended it, not pushed before; its text is added with include_stop
        alone (special tokens included), and it is not counted in n_tokens_used. Never a matched_stop:
        no token comes any more to complete one. To be called once, and not after push() returned a
        matched_stop.
        """
        text = self._held + self._detokenizer.finish()
        self._held = ""
        if stop_token is not None and self._include_stop:
            text += self._tokenizer.token_bytes(stop_token).decode("utf-8", "replace")
        return Delta(text, 0)
