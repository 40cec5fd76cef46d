"""What the engine understands of a model's files and what serving it would take, for the command line.

Loads the heavy parts of it only when asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.plan_report import (
    DeviceFigures,
    Outlook,
    PlanReport,
    gpu_figures,
    plan_model,
    plan_outlooks,
    stated_figures,
)
from engine.product_figures import ProductFigure, list_products, measure_products

if TYPE_CHECKING:
    from engine.inspect import ModelReport

__all__ = [
    "DeviceFigures",
    "Outlook",
    "PlanReport",
    "ProductFigure",
    "gpu_figures",
    "inspect_model",
    "list_products",
    "measure_products",
    "plan_model",
    "plan_outlooks",
    "stated_figures",
]


def inspect_model(path: Path) -> ModelReport:
    """Looks into a model folder or a .gguf file, without reading weights. Raises ModelError."""
    from engine.inspect import inspect_model as inspect

    return inspect(path)
