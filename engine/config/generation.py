"""What a model's authors recommend for sampling, and which tokens end a text, as JSON files state it.

Knows no request: whoever serves the model fills in what a request leaves out. No engine needs these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.config.reader import Section


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What to use where a request says nothing; None: the model says nothing either."""

    temperature: float | None = None
    """0.0 where the model asks for greedy decoding (do_sample false)."""
    top_p: float | None = None
    """Above 0."""
    top_k: int | None = None
    """0: no limit."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    """Above 0."""
    max_new_tokens: int | None = None


_SMALLEST = 1e-6
"""Stands for "above 0"."""


def read_generation_defaults(
    values: Mapping[str, object], where: str = "generation_config.json"
) -> GenerationDefaults:
    """From a parsed generation_config.json. Raises ConfigError for a value that no request might have."""
    section = Section(values, where)
    temperature = section.number("temperature", None, minimum=0.0, maximum=100.0)
    if section.boolean("do_sample", None) is False:
        temperature = 0.0
    top_k = section.integer("top_k", None, minimum=-1)
    return GenerationDefaults(
        temperature=temperature,
        top_p=section.number("top_p", None, minimum=_SMALLEST, maximum=1.0),
        # Some models write no limit as -1.
        top_k=None if top_k is None else max(top_k, 0),
        min_p=section.number("min_p", None, minimum=0.0, maximum=1.0),
        repetition_penalty=section.number("repetition_penalty", None, minimum=_SMALLEST, maximum=10.0),
        max_new_tokens=section.integer("max_new_tokens", None),
    )


def read_eos_token_ids(values: Mapping[str, object], where: str) -> tuple[int, ...]:
    """`eos_token_id` of a generation_config.json or config.json: an id, a list of ids or nothing.

    Raises ConfigError.
    """
    return Section(values, where).integers("eos_token_id", ())
