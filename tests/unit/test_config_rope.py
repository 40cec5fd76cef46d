"""Rope tables against what transformers computes for the settings of real models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.config import RopeKind, RopeSpec
from engine.config.reader import Section
from engine.config.rope_reader import read_rope
from engine.errors import ConfigError, UnsupportedModelError
from tests.parity.families import ROPES, golden_rope


def _read(parameters: dict[str, Any], head_dim: int, **more: Any) -> RopeSpec:
    config = {"max_position_embeddings": 131072, "rope_parameters": parameters} | more
    return read_rope(Section(config), head_dim)


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_those_of_transformers(name: str) -> None:
    parameters = ROPES[name].parameters
    config = Section({"max_position_embeddings": 131072, "rope_parameters": parameters})
    rope = read_rope(config, ROPES[name].head_dim, default_partial=1.0)
    frequencies, factor = golden_rope(name)
    np.testing.assert_allclose(rope.inverse_frequencies(), frequencies, rtol=2e-6)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-6)


def test_old_and_new_spelling_are_the_same_table() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    new = _read(scaling | {"rope_type": "llama3", "rope_theta": 5e5}, 128)
    old = read_rope(Section({"rope_theta": 5e5, "rope_scaling": scaling | {"type": "llama3"}}), 128)
    assert new == old
    assert new.kind is RopeKind.LLAMA3


def test_theta_inside_rope_parameters_wins() -> None:
    assert _read({"rope_type": "default", "rope_theta": 7e5}, 64, rope_theta=1e4).theta == 7e5
    assert _read({"rope_type": "default"}, 64, rope_theta=3e4).theta == 3e4
    assert read_rope(Section({}), 64).theta == 1e4


def test_multimodal_rope_is_the_default_one_for_text() -> None:
    rope = _read({"type": "mrope", "mrope_section": [16, 24, 24], "rope_theta": 1e6}, 128)
    assert rope == RopeSpec(RopeKind.DEFAULT, 1e6, 128, 128)


def test_yarn_falls_back_to_the_length_of_the_model() -> None:
    assert _read({"rope_type": "yarn", "factor": 2.0}, 64).original_max_position == 131072
    outside = _read({"rope_type": "yarn", "factor": 2.0}, 64, original_max_position_embeddings=4096)
    assert outside.original_max_position == 4096


def test_frequency_factors_divide() -> None:
    rope = RopeSpec(RopeKind.DEFAULT, 1e4, 8, 8, frequency_factors=(1.0, 2.0, 4.0, 1e30))
    plain = RopeSpec(RopeKind.DEFAULT, 1e4, 8, 8).inverse_frequencies()
    expected = plain / np.asarray([1, 2, 4, 1e30], np.float32)
    np.testing.assert_array_equal(rope.inverse_frequencies(), expected)


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "su", "ntk", "axial"])
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=f"{kind!r} is not supported; supported are default, linear"
    ):
        _read({"rope_type": kind, "factor": 2.0}, 64)


def test_partial_rotation_is_refused_where_the_family_has_none() -> None:
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor"):
        _read({"rope_type": "default", "partial_rotary_factor": 0.5}, 64)


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": 0}, "factor must lie between"),
        ({"rope_type": "linear", "factor": "2"}, "factor must be a finite number"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor is missing"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "high_freq_factor .* must be greater than low_freq_factor",
        ),
        (
            {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1.0},
            "rope_theta must be greater than 1 for yarn",
        ),
        ({"rope_type": 3}, "rope_type must be a string"),
        ({"rope_type": "default", "rope_theta": -1}, "rope_theta must lie between"),
        ({"rope_type": "default", "rope_theta": float("nan")}, "rope_theta must be a finite number"),
    ],
)
def test_malformed_settings_name_the_key(parameters: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        _read(parameters, 64)
