"""The CUDA engine's own code with e4m3 pages; numpy carries out its kernels on host memory."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")
pytest.importorskip("nvmath")

from tests.cuda_scenarios import Load
from tests.kv_fp8_scenarios import SCENARIOS
from tests.unit.cuda_twin import load_twin

__all__ = ["load_twin"]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(tmp_path: Path, load_twin: Load, scenario: object) -> None:
    scenario(load_twin, tmp_path)  # type: ignore[operator]
