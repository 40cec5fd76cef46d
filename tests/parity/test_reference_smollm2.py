"""The demo model on the reference engine against what transformers generates from the same weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.factory import load_engine
from engine.interface import Engine
from engine.options import EngineOptions
from tests.parity.reference_driver import Driver

GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2.json").read_text())["cases"]


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[Engine]:
    options = EngineOptions(
        demo_model, engine="reference", max_sequences=len(GOLDEN), max_sequence_length=256, threads=1
    )
    engine = load_engine(options)
    yield engine
    engine.close()


def test_ten_prompts_in_one_batch_equal_transformers(engine: Engine) -> None:
    driver = Driver(engine)
    for slot, case in enumerate(GOLDEN):
        driver.start(slot, case["prompt"])
    driver.prefill(*range(len(GOLDEN)))
    driver.decode(len(GOLDEN[0]["tokens"]) - 1)
    for slot, case in enumerate(GOLDEN):
        assert driver.tokens[slot] == case["tokens"], f"prompt {slot}"


def test_a_prompt_alone_in_odd_chunks_gives_the_same(engine: Engine) -> None:
    case = GOLDEN[3]
    driver = Driver(engine)
    driver.start(5, case["prompt"])
    driver.prefill(5, chunk=17)
    driver.decode(23)
    assert driver.tokens[5] == case["tokens"][:24]
