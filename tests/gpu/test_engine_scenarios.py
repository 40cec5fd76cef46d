"""The CUDA engine on a GPU: what must hold of it, and the reference engine's log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")
pytest.importorskip("nvmath")

from engine.cuda.device import why_no_gpu
from engine.cuda.loading import load_cuda_engine
from engine.cuda.settings import CudaSettings
from engine.interface import Engine
from engine.options import EngineOptions
from tests.cuda_scenarios import (
    FAMILIES,
    SCENARIOS,
    Load,
    a_family_has_the_logprobs_of_the_reference,
    decoded_logprobs_are_those_of_the_reference,
    family_cases,
    logprobs_are_those_of_the_reference,
)
from tests.fp8_scenarios import FAMILIES as FP8_FAMILIES
from tests.fp8_scenarios import SCENARIOS as FP8_SCENARIOS
from tests.kv_fp8_scenarios import SCENARIOS as KV_FP8_SCENARIOS
from tests.parity.families import Case
from tests.recall_scenarios import SCENARIOS as RECALL_SCENARIOS
from tests.recall_scenarios import TIERS

pytestmark = pytest.mark.gpu
LAZY = CudaSettings(tune=False, capture=False)
ONE_ARM = CudaSettings(tune=False, capture=False, decode_widths=(8,), prefill_sizes=(128,))
"""A bucket for everything: what shares a batch must not change a bit then."""


@pytest.fixture
def load() -> Iterator[Load]:
    """Loads engines of one arm and closes them after the test; skips without a GPU."""
    yield from _loading(ONE_ARM)


@pytest.fixture
def load_with_all_arms() -> Iterator[Load]:
    """The same with the buckets of serving."""
    yield from _loading(LAZY)


def _loading(settings: CudaSettings) -> Iterator[Load]:
    reason = why_no_gpu()
    if reason is not None:
        pytest.skip(reason)
    engines: list[Engine] = []

    def make(options: EngineOptions) -> Engine:
        engines.append(load_cuda_engine(options, None, settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_the_reference(tmp_path: Path, load_with_all_arms: Load, family: str) -> None:
    logprobs_are_those_of_the_reference(load_with_all_arms, tmp_path, family)


def test_decoded_logprobs_are_those_of_the_reference(tmp_path: Path, load_with_all_arms: Load) -> None:
    decoded_logprobs_are_those_of_the_reference(load_with_all_arms, tmp_path)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(tmp_path: Path, load: Load, scenario: object) -> None:
    scenario(load, tmp_path)  # type: ignore[operator]


@pytest.mark.parametrize("case", family_cases(), ids=lambda case: case.id)
def test_a_family_has_the_logprobs_of_the_reference(
    tmp_path: Path, load_with_all_arms: Load, case: Case
) -> None:
    a_family_has_the_logprobs_of_the_reference(load_with_all_arms, tmp_path, case)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("scenario", RECALL_SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_every_token_is_foretold_by_whatever_arm(
    tmp_path: Path, load_with_all_arms: Load, scenario: object, tier: str
) -> None:
    scenario(load_with_all_arms, tmp_path, **TIERS[tier])  # type: ignore[operator]


@pytest.mark.parametrize("family", FP8_FAMILIES)
@pytest.mark.parametrize("scenario", FP8_SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_fp8_scenario(tmp_path: Path, load_with_all_arms: Load, scenario: object, family: str) -> None:
    scenario(load_with_all_arms, tmp_path, family)  # type: ignore[operator]


@pytest.mark.parametrize("scenario", KV_FP8_SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_kv_fp8_scenario(tmp_path: Path, load: Load, scenario: object) -> None:
    scenario(load, tmp_path)  # type: ignore[operator]
