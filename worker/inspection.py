"""What the engine understands of a model's files, for the command line. Loads that code only when asked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.inspect import ModelReport


def inspect_model(path: Path) -> ModelReport:
    """Looks into a model folder or a .gguf file, without reading weights. Raises ModelError."""
    from engine.inspect import inspect_model as inspect

    return inspect(path)
