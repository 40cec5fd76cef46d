"""One answer's tokens to text: detokenizing, special tokens, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.text.stops import StopSet
from service.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Delta:
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
    complete first wins; of those complete at the same character, the longest.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        stops: StopSet | None = None,
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        starts_text: bool = False,
    ) -> None:
        """`starts_text`: the answer has no prompt before it, so a SentencePiece tokenizer's leading
        space goes."""
        raise NotImplementedError

    def push(self, token_ids: Sequence[int]) -> Delta:
        """Adds tokens, any number at once. A stop token that ends the answer belongs in finish()."""
        raise NotImplementedError

    def finish(self, stop_token: int | None = None) -> Delta:
        """The answer is over: whatever was held back.

        `stop_token`: the token id that ended it, not pushed before; its text is added with include_stop
        alone (special tokens included), and it is not counted in n_tokens_used. matched_stop is set in
        the rare case that text still held completes a stop string. To be called once, and not after
        push() returned a matched_stop.
        """
        raise NotImplementedError
