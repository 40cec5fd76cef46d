"""How KV pages are fitted beside everything else, and what a refusal says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.interface import pages_for
from engine.memory_plan import MemoryBudget, MemoryPlan, fit_pages
from engine.options import EngineOptions


def _options(**changes: object) -> EngineOptions:
    return EngineOptions(model=Path("model"), **changes)  # type: ignore[arg-type]


def plan(
    fixed: dict[str, int],
    page_bytes: int,
    options: EngineOptions,
    *,
    model_length: int,
    budget: int,
    usual_pages: int | None = None,
) -> MemoryPlan:
    return fit_pages(
        fixed,
        page_bytes,
        options,
        model_length=model_length,
        budget=MemoryBudget(budget, "what there is"),
        usual_pages=usual_pages,
    )


def test_all_that_is_left_becomes_pages() -> None:
    made = plan({"weights": 60, "logits": 15}, 10, _options(), model_length=128, budget=109)
    assert made.pages == 3
    assert made.bytes_by_purpose == {"weights": 60, "logits": 15, "kv_pages": 30}
    assert made.max_sequence_length == 128
    assert made.shortened is None


def test_a_long_model_is_cut_to_the_pages_there_are_and_says_so() -> None:
    made = plan({"weights": 60}, 10, _options(), model_length=4096, budget=100)
    assert made.max_sequence_length == 256
    assert made.shortened is not None
    assert "4096 to 256" in made.shortened


def test_pages_asked_for_are_the_pages_taken() -> None:
    made = plan({"weights": 60}, 10, _options(kv_pages=2), model_length=64, budget=1000)
    assert made.pages == 2
    with pytest.raises(ModelError, match="kv pages"):
        plan({"weights": 60}, 10, _options(kv_pages=2), model_length=64, budget=79)


def test_a_length_asked_for_is_kept_or_refused() -> None:
    options = _options(max_sequence_length=200)
    assert plan({}, 10, options, model_length=4096, budget=40).max_sequence_length == 200
    with pytest.raises(ModelError, match="does not fit"):
        plan({}, 10, options, model_length=4096, budget=39)
    with pytest.raises(ModelError, match="raise kv_pages or lower max_sequence_length"):
        plan({}, 10, _options(max_sequence_length=200, kv_pages=3), model_length=4096, budget=1000)
    with pytest.raises(ModelError, match=r"not in 1 … 128"):
        plan({}, 10, options, model_length=128, budget=1000)


def test_a_refusal_names_every_part_and_what_to_lower() -> None:
    fixed = {"weights": 16 * 10**9, "activations": 3 * 10**9, "logits": 250 * 10**6}
    with pytest.raises(ModelError) as refusal:
        plan(fixed, 9 * 10**6, _options(memory_fraction=0.5), model_length=4096, budget=12 * 10**9)
    message = str(refusal.value)
    for part in ("12.00 GB", "weights 16.00 GB", "activations 3.00 GB", "logits 250.0 MB", "kv pages 9.0 MB"):
        assert part in message
    assert message.index("smaller model") < message.index("max_step_tokens") < message.index("max_sequences")
    assert "memory_fraction 0.5 of what there is" in message


@given(st.integers(0, 10**6))
def test_pages_hold_the_tokens(tokens: int) -> None:
    assert (pages_for(tokens) - 1) * 64 < max(tokens, 1) <= max(1, pages_for(tokens)) * 64


def test_no_more_pages_than_usual_are_taken() -> None:
    assert plan({}, 10, _options(), model_length=64, budget=1000, usual_pages=7).pages == 7
    assert plan({}, 10, _options(), model_length=64, budget=50, usual_pages=7).pages == 5
    assert plan({}, 10, _options(kv_pages=9), model_length=64, budget=1000, usual_pages=7).pages == 9
