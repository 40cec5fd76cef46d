"""The perplexity script: what it computes, and which figures it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.interface import Sampling
from scripts.gpu.perplexity import Row, as_table, faults, measure, perplexity, windows
from tests.cuda_scenarios import checkpoint, prompt, reference

GOOD = [
    Row("reference", "bf16", "auto", 30.0, 1.0),
    Row("reference", "q4", "auto", 36.0, 1.0),
    Row("cuda", "bf16", "auto", 30.1, 1.0),
    Row("cuda", "q4", "auto", 36.3, 1.0),
    Row("cuda", "fp8", "auto", 30.9, 1.0),
    Row("cuda", "fp8", "fp8", 31.0, 1.0),
]


def test_it_is_the_exponential_of_the_mean_over_all_predicted_tokens(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    parts = [prompt(40), prompt(9, seed=1)]
    driver = reference(tmp_path, kv_pages=64)
    logprobs = []
    for part in parts:
        for length in range(1, len(part)):
            forced = Sampling(temperature=0.0, logit_bias={part[length]: 1e6}, logprobs=0)
            driver.start(0, part[:length], forced)
            driver.prefill(0)
            assert driver.tokens[0] == [part[length]]
            logprobs.append(driver.logprobs[0][0].logprob)
    found = perplexity(reference(tmp_path, max_step_tokens=96).engine, parts)
    assert found == pytest.approx(math.exp(-float(np.mean(logprobs))), rel=1e-5)


def test_a_tier_is_measured_with_its_own_rounding(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    rows = [
        measure(tmp_path, "reference", tier, [prompt(90)])
        for tier in (("bf16", "auto"), ("q4", "auto"), ("fp8", "auto"), ("fp8", "fp8"))
    ]
    assert len({row.perplexity for row in rows}) == 4
    assert all(row.perplexity == pytest.approx(rows[0].perplexity, rel=0.2) for row in rows)


def test_a_short_rest_of_the_text_is_left_out() -> None:
    assert [len(part) for part in windows(range(1000), 400)] == [400, 400, 200]
    assert [len(part) for part in windows(range(850), 400)] == [400, 400]


def test_figures_that_agree_have_no_fault() -> None:
    assert faults(GOOD) == []
    assert "| cuda fp8, KV fp8 | 31.0000 | +2.99% |  | 1.0 |" in as_table(GOOD, [])


@pytest.mark.parametrize(
    ("index", "value", "fault"),
    [
        (3, 36.5, "cuda q4: +1.39% off the reference engine"),
        (3, 35.0, "cuda q4: -2.78% off the reference engine"),
        (5, 31.1, "cuda fp8, KV fp8: 3.32% above bf16"),
    ],
)
def test_a_figure_off_by_more_than_rounding_is_told(index: int, value: float, fault: str) -> None:
    rows = list(GOOD)
    rows[index] = replace(rows[index], perplexity=value)
    assert faults(rows) == [fault]
    assert f"**{fault}**" in as_table(rows, [fault])
