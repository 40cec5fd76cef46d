"""What a model's generation_config.json asks for: read strictly, as no request says it."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config.generation import GenerationDefaults, read_eos_token_ids, read_generation_defaults
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, GenerationDefaults()),
        (
            {
                "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0,
                "repetition_penalty": 1.1, "max_new_tokens": 2048, "num_beams": 4,
            },
            GenerationDefaults(0.6, 0.95, 20, 0.0, 1.1, 2048),
        ),
        ({"do_sample": False, "temperature": 0.7}, GenerationDefaults(temperature=0.0)),
        ({"temperature": 0, "top_p": 1}, GenerationDefaults(temperature=0.0, top_p=1.0)),
        ({"temperature": None, "top_k": None, "do_sample": None}, GenerationDefaults()),
        ({"top_k": -1}, GenerationDefaults(top_k=0)),
        ({"top_k": 50.0}, GenerationDefaults(top_k=50)),
    ],
)  # fmt: skip
def test_defaults(values: dict[str, Any], expected: GenerationDefaults) -> None:
    assert read_generation_defaults(values) == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 3),
        ("top_k", 1.5),
        ("top_k", -2),
        ("min_p", 7),
        ("repetition_penalty", 0),
        ("repetition_penalty", 11),
        ("max_new_tokens", 0),
        ("do_sample", "no"),
    ],
)
def test_values_that_no_request_might_have_are_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^a/generation_config\.json: {key} must"):
        read_generation_defaults({key: value}, "a/generation_config.json")


@pytest.mark.parametrize(
    ("value", "expected"), [(None, ()), (0, (0,)), (7, (7,)), ([7, 8], (7, 8)), ([], ())]
)
def test_ids_that_end_a_text(value: object, expected: tuple[int, ...]) -> None:
    assert read_eos_token_ids({"eos_token_id": value}, "config.json") == expected
    assert read_eos_token_ids({}, "config.json") == ()


@pytest.mark.parametrize("value", [-1, "2", [2, -1], [None], {"id": 2}])
def test_ids_that_are_none_are_named(value: object) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: eos_token_id must be"):
        read_eos_token_ids({"eos_token_id": value}, "config.json")
