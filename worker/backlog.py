"""What a front has not read yet, kept small: waiting step messages merge into one. Knows no socket."""

from __future__ import annotations

from collections.abc import Iterable

from worker.messages import StepTokens, WorkerToFront

MAX_BACKLOG = 1 << 20
"""Entries (tokens, log-probabilities) that may wait for one front, about 40 MB. One that lets more gather
has stood still for long; it is cut off, and submits anew what it still wants when it comes back."""


def merge_step_tokens(last: WorkerToFront, new: WorkerToFront) -> bool:
    """Takes `new` into `last` if both are StepTokens; a key may then occur more than once in `keys`."""
    if not (isinstance(last, StepTokens) and isinstance(new, StepTokens)):
        return False
    last.keys.extend(new.keys)
    last.counts.extend(new.counts)
    last.tokens.extend(new.tokens)
    last.started.extend(new.started)
    last.finished.extend(new.finished)
    for key, logprobs in new.logprobs.items():
        last.logprobs.setdefault(key, []).extend(logprobs)
    last.prompt_logprobs.update(new.prompt_logprobs)
    return True


def backlog_size(messages: Iterable[WorkerToFront]) -> int:
    """Entries in messages that wait to be sent."""
    return sum(_entries(message) for message in messages)


def _entries(message: WorkerToFront) -> int:
    if not isinstance(message, StepTokens):
        return 1
    entries = len(message.tokens)
    for logprobs in (*message.logprobs.values(), *message.prompt_logprobs.values()):
        entries += len(logprobs) * (1 + len(logprobs[-1].top_ids) if logprobs else 0)
    return entries
