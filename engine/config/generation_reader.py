"""Reads generation_config.json, and the token ids that config.json repeats."""

from __future__ import annotations

from engine.config.generation import GenerationDefaults
from engine.config.reader import Section


def read_generation(generation: Section, config: Section) -> GenerationDefaults:
    """`generation` wins over `config`, which knows token ids only. Raises ConfigError."""
    temperature = generation.number("temperature", None, minimum=0.0, maximum=100.0)
    if generation.boolean("do_sample", None) is False:
        temperature = 0.0
    return GenerationDefaults(
        temperature=temperature,
        top_p=generation.number("top_p", None, minimum=0.0, maximum=1.0),
        top_k=generation.integer("top_k", None, minimum=0),
        min_p=generation.number("min_p", None, minimum=0.0, maximum=1.0),
        repetition_penalty=generation.number("repetition_penalty", None, minimum=0.01, maximum=100.0),
        max_new_tokens=generation.integer("max_new_tokens", None),
        eos_token_ids=generation.integers("eos_token_id", config.integers("eos_token_id", ())),
        bos_token_id=_token(generation, config, "bos_token_id"),
        pad_token_id=_token(generation, config, "pad_token_id"),
    )


def _token(generation: Section, config: Section, key: str) -> int | None:
    return generation.integer(key, config.integer(key, None, minimum=0), minimum=0)
