"""The model whose every token is foretold: on the reference engine, and on the CUDA engine's twin."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.factory import load_engine
from engine.interface import Engine, Sampling
from engine.options import EngineOptions
from scripts.gpu.make_random_checkpoint import MODELS
from scripts.gpu.recall_model import TINY, Recall, make_recall_model, score_shares
from tests.parity.reference_driver import Driver
from tests.recall_scenarios import GREEDY, SCENARIOS, TIERS, Load, foretold, options, prompt
from tests.unit.cuda_twin import load_twin

__all__ = ["load_twin"]


def load_reference(chosen: EngineOptions) -> Engine:
    return load_engine(EngineOptions(**_fields(chosen) | {"engine": "reference", "threads": 1}))


def _fields(chosen: EngineOptions) -> dict[str, object]:
    return {name: getattr(chosen, name) for name in chosen.__dataclass_fields__}


def test_the_reference_engine_recalls_what_is_foretold(tmp_path: Path) -> None:
    """Greedily; float32 leaves in what bf16 rounds away, so draws at an edge may fall to the other side."""
    model = make_recall_model(tmp_path, TINY)
    driver = Driver(load_reference(options(tmp_path)))
    for slot, length in enumerate((2, 64, 65, 200)):
        driver.start(slot, prompt(length))
        driver.prefill(slot, chunk=50)
        driver.decode(12, slot)
        assert driver.tokens[slot] == foretold(model, prompt(length), GREEDY, 13)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario_on_the_twin(tmp_path: Path, load_twin: Load, scenario: object, tier: str) -> None:
    scenario(load_twin, tmp_path, **TIERS[tier])  # type: ignore[operator]


def test_another_page_anywhere_changes_the_answer() -> None:
    """Or a wrong one would go unseen."""
    model = Recall.of(MODELS["qwen3-1.7b"] | {"vocab_size": TINY["vocab_size"]})
    text = prompt(700)
    answer = foretold(model, text, GREEDY, 16)
    for page in range(10):
        changed = list(text)
        changed[page * 64 + 1 : page * 64 + 64] = prompt(64, seed=1)[1:]
        assert foretold(model, changed, GREEDY, 16) != answer, page


@pytest.mark.parametrize("name", ["qwen3-1.7b", "qwen3-8b"])
def test_real_shapes_have_room_and_scores_that_tell_tokens_apart(name: str) -> None:
    config = MODELS[name]
    Recall.of(config)
    share, frequency, sink = score_shares(config["rope_theta"], config["head_dim"])
    away = np.cos(np.arange(1, 4096)[:, None] * frequency) @ share
    assert share.sum() == pytest.approx(1)
    assert 320 * (1 - sink) > 25
    assert 320 * (sink - away.max()) > 25


def test_a_model_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="has no room for 9 layers"):
        Recall.of(TINY | {"num_hidden_layers": 9})
    with pytest.raises(ValueError, match="intermediate size 64"):
        Recall.of(TINY | {"intermediate_size": 64})


def test_draws_differ_from_the_greedy_answer_and_from_seed_to_seed() -> None:
    """A model without a choice would show nothing of sampling."""
    model = Recall.of(TINY)
    answers = {
        tuple(foretold(model, prompt(40), Sampling(temperature=1.0, top_k=8, seed=seed), 12))
        for seed in range(4)
    }
    answers.add(tuple(foretold(model, prompt(40), GREEDY, 12)))
    assert len(answers) == 5
