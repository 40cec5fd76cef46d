"""A model's own wishes about sampling and stopping (generation_config.json). Knows no request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What to use where a request says nothing; None: the model says nothing either."""

    temperature: float | None = None
    """0.0 where the model asks for greedy decoding (do_sample false)."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
