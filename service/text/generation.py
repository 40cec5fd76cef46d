"""What the model's authors recommend for sampling, and which tokens end a text (generation_config.json).

Knows nothing of requests: a servicer fills the fields a request leaves out from these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling defaults that the model states; None where it states none."""

    temperature: float | None = None
    """0 where the model states `do_sample: false`."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> GenerationDefaults:
        """From generation_config.json. Values of the wrong type or out of range count as not stated."""
        greedy = config.get("do_sample") is False
        return cls(
            temperature=0.0 if greedy else _number(config, "temperature", 0.0, 100.0),
            top_p=_number(config, "top_p", 0.0, 1.0, above=True),
            top_k=_integer(config, "top_k"),
            min_p=_number(config, "min_p", 0.0, 1.0),
            repetition_penalty=_number(config, "repetition_penalty", 0.0, 10.0, above=True),
            max_new_tokens=_integer(config, "max_new_tokens") or None,
        )


def token_ids(value: object) -> tuple[int, ...]:
    """An id, a list of ids or nothing, as configurations state `eos_token_id`."""
    candidates = value if isinstance(value, list) else [value]
    return tuple(i for i in candidates if isinstance(i, int) and not isinstance(i, bool) and i >= 0)


def _number(
    config: Mapping[str, Any], name: str, least: float, most: float, *, above: bool = False
) -> float | None:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not least <= value <= most or (above and value == least):
        return None
    return float(value)


def _integer(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return None
    return value
