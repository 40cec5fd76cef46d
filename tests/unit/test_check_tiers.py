"""Each tier of the CUDA engine against the reference engine that rounds alike, on the host twin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")
pytest.importorskip("nvmath")

from engine.interface import Engine
from engine.options import EngineOptions, Precision
from scripts.gpu import check_tiers
from tests.cuda_scenarios import Load
from tests.unit.cuda_twin import load_twin

__all__ = ["load_twin"]


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_tiers, "ROWS", (1, 9))


@pytest.mark.parametrize("tier", check_tiers.TIERS)
def test_a_tier_has_the_logprobs_of_the_reference(tmp_path: Path, load_twin: Load, tier: str) -> None:
    errors = check_tiers.tier_errors(load_twin, tmp_path, tier)
    assert list(errors) == ["prefill", "decode ×1", "decode ×9", "the tier itself"]


def test_another_rounding_than_the_tiers_own_is_seen(tmp_path: Path, load_twin: Load) -> None:
    """q4 moves log-probabilities by twenty times what bf16 rounds: an engine that skips it fails."""

    def load_without(options: EngineOptions) -> Engine:
        return load_twin(replace(options, precision=Precision.BF16))

    with pytest.raises(AssertionError, match=r"'q4', \{'prefill': 0\.2"):
        check_tiers.tier_errors(load_without, tmp_path, "q4")
