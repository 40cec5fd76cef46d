"""What has happened to one front's sequences and has not been told yet."""

from __future__ import annotations

from engine.interface import TokenLogprobs
from worker.messages import Finished, Started, StepTokens
from worker.sequence import Sequence


class FrontNews:
    """Gathers, to be taken whole as one message.

    `keys` and `tokens` are public and run in parallel: the scheduler appends to them for every token,
    and at tens of thousands a second a method call each would show.
    """

    def __init__(self) -> None:
        self.sequences: dict[int, Sequence] = {}
        """The front's live sequences by key."""
        self.keys: list[int] = []
        self.tokens: list[int] = []
        self.started: list[Started] = []
        self.finished: list[Finished] = []
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self._unwanted: set[int] = set()

    def silence(self, key: int) -> None:
        """Nothing about this sequence is to be told any more."""
        self._unwanted.add(key)

    def take(self, *, merge: bool) -> StepTokens | None:
        """All since the last call, or None if that is nothing.

        `merge` says that a key may stand more than once in `keys`.
        """
        if self._unwanted:
            self._drop_unwanted()
        if not (self.keys or self.finished or self.started or self.prompt_logprobs):
            return None
        keys, tokens = self.keys, self.tokens
        if merge:
            keys, counts, tokens = _merge(keys, tokens)
        else:
            counts = [1] * len(keys)
        message = StepTokens(
            keys, counts, tokens, self.started, self.finished, self.logprobs, self.prompt_logprobs
        )
        self.keys, self.tokens, self.started, self.finished = [], [], [], []
        self.logprobs, self.prompt_logprobs = {}, {}
        return message

    def _drop_unwanted(self) -> None:
        unwanted, self._unwanted = self._unwanted, set()
        wanted = [
            (key, token) for key, token in zip(self.keys, self.tokens, strict=True) if key not in unwanted
        ]
        self.keys = [key for key, _ in wanted]
        self.tokens = [token for _, token in wanted]
        self.started = [started for started in self.started if started.key not in unwanted]
        self.finished = [finished for finished in self.finished if finished.key not in unwanted]
        for key in unwanted:
            self.logprobs.pop(key, None)
            self.prompt_logprobs.pop(key, None)


def _merge(keys: list[int], tokens: list[int]) -> tuple[list[int], list[int], list[int]]:
    by_key: dict[int, list[int]] = {}
    for key, token in zip(keys, tokens, strict=True):
        by_key.setdefault(key, []).append(token)
    return (
        list(by_key),
        [len(own) for own in by_key.values()],
        [token for own in by_key.values() for token in own],
    )
