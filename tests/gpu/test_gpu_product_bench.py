"""`slipstream bench plans` on a GPU: every product of a small model is timed in every tier."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_support import needs_gpu

from engine.options import EngineOptions, Precision
from engine.plan_report import gpu_figures
from engine.product_figures import measure_products
from tests.cuda_scenarios import checkpoint

pytestmark = needs_gpu


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.Q4, Precision.FP8])
def test_every_product_is_timed(tmp_path: Path, precision: Precision) -> None:
    """Rows of a bucket, and others, whose products are captured without having been tuned."""
    options = EngineOptions(
        checkpoint(tmp_path, hidden=256), precision=precision, max_sequences=8, max_step_tokens=64
    )
    figures = list(measure_products(tmp_path, options, gpu_figures(0), [1, 8, 33, 64]))
    assert len(figures) == 4 * 5
    for figure in figures:
        assert figure.microseconds is not None
        assert 0.1 < figure.microseconds < 10_000
