"""A step's work as the device will do it: which programs run, on which rows. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SampleKey:
    """What the launches that sample depend on."""

    width: int
    """Rows, padding included."""
    greedy: bool
    """All rows have temperature 0."""
    logprobs: bool
    """Some row wants log-probabilities."""
    long: bool = False
    """Decoding: some sequence is long for so many rows (reach.py)."""


@dataclass(frozen=True, slots=True)
class SampleWork:
    """Rows that sample, in order."""

    slots: list[int]
    key: SampleKey


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Entries of the prompt log-probability lists that belong to one slot."""

    slot: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """A ragged pass."""

    size: int
    """Rows, padding included."""
    first_tokens: SampleWork | None
    """The sequences whose prompts end in this pass."""
    prompt_spans: list[PromptSpan]
    carried: list[tuple[int, int]]
    """(row, slot): the row whose logits the slot's next chunk needs."""

    @property
    def prompt_entries(self) -> int:
        return sum(span.count for span in self.prompt_spans)


@dataclass(frozen=True, slots=True)
class StepWork:
    """What is staged for a step."""

    copy_bytes: int
    """Of the staging region's beginning; 0: the device has it all already."""
    changes: int
    pages: int
    prefill: PrefillWork | None
    decode: SampleWork | None

    @property
    def sampled_slots(self) -> list[int]:
        """Slots that get a token, if they are still active."""
        first = self.prefill.first_tokens if self.prefill is not None else None
        return [slot for rows in (first, self.decode) if rows is not None for slot in rows.slots]
