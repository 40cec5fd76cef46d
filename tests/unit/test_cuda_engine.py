"""The CUDA engine's own code against the reference engine; numpy carries out its kernels on host memory."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")
pytest.importorskip("nvmath")

from tests.cuda_scenarios import (
    FAMILIES,
    SCENARIOS,
    Load,
    a_family_has_the_logprobs_of_the_reference,
    family_cases,
    logprobs_are_those_of_the_reference,
)
from tests.parity.families import Case
from tests.unit.cuda_twin import load_twin

__all__ = ["load_twin"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_the_reference(tmp_path: Path, load_twin: Load, family: str) -> None:
    logprobs_are_those_of_the_reference(load_twin, tmp_path, family)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(tmp_path: Path, load_twin: Load, scenario: object) -> None:
    scenario(load_twin, tmp_path)  # type: ignore[operator]


@pytest.mark.parametrize("case", family_cases(), ids=lambda case: case.id)
def test_a_family_has_the_logprobs_of_the_reference(tmp_path: Path, load_twin: Load, case: Case) -> None:
    a_family_has_the_logprobs_of_the_reference(load_twin, tmp_path, case)
