"""How the reference engine divides memory, and what it says when there is too little."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.checkpoint import open_checkpoint
from engine.config import ModelConfig
from engine.errors import ModelError
from engine.options import EngineOptions, StepSizes
from engine.reference.memory import available_bytes, parameter_count, plan_memory

GIGABYTE = 10**9
THREE = StepSizes(max_sequences=3, max_step_tokens=2048)
PAGE_BYTES = 64 * 4 * 2 * 2 * 2 * 16
"""64 tokens of float32 K and V in two layers of two heads of 16."""


@pytest.fixture(scope="module")
def config(tiny_checkpoint: Path) -> ModelConfig:
    with open_checkpoint(tiny_checkpoint) as checkpoint:
        return checkpoint.config


def test_every_slot_gets_pages_for_a_usual_sequence(config: ModelConfig) -> None:
    plan = plan_memory(config, EngineOptions(Path()), THREE, GIGABYTE)
    assert plan.pages == 3 * 2048 // 64
    assert plan.max_sequence_length == 2048
    assert plan.shortened is None
    assert plan.bytes_by_purpose["kv_pages"] == plan.pages * PAGE_BYTES
    assert plan.bytes_by_purpose["weights"] == 4 * parameter_count(config)


def test_less_memory_means_fewer_pages_and_then_shorter_sequences(config: ModelConfig) -> None:
    options = EngineOptions(Path(), memory_fraction=1.0)
    fixed = sum(plan_memory(config, options, THREE, GIGABYTE).bytes_by_purpose.values()) - 96 * PAGE_BYTES
    fewer = plan_memory(config, options, THREE, fixed + 40 * PAGE_BYTES)
    assert (fewer.pages, fewer.max_sequence_length, fewer.shortened) == (40, 2048, None)
    shorter = plan_memory(config, options, THREE, fixed + 10 * PAGE_BYTES)
    assert (shorter.pages, shorter.max_sequence_length) == (10, 640)
    assert shorter.shortened == "longest sequence cut from 2048 to 640 tokens by the KV pages"
    with pytest.raises(ModelError, match=r"does not fit.*weights.*kv pages.*lower max_sequences"):
        plan_memory(config, options, THREE, fixed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_pages": 10**7}, "does not fit"),
        ({"max_sequence_length": 0}, "max_sequence_length 0 is not in 1 … 2048"),
        ({"max_sequence_length": 2049}, "max_sequence_length 2049 is not in 1 … 2048"),
        ({"max_sequence_length": 2048, "kv_pages": 31}, "31 KV pages hold 1984 tokens"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(
    config: ModelConfig, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        plan_memory(config, EngineOptions(Path(), **options), THREE, GIGABYTE)  # type: ignore[arg-type]


def test_kv_pages_are_as_asked_for(config: ModelConfig) -> None:
    plan = plan_memory(config, EngineOptions(Path(), kv_pages=5), THREE, GIGABYTE)
    assert (plan.pages, plan.max_sequence_length) == (5, 320)
    assert plan.shortened is not None


def test_there_is_some_memory() -> None:
    assert available_bytes() > 10**6
