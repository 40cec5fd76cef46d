"""What model lookup gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class ModelNotFound(Exception):
    """The name leads to no usable model files; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Where a model's files are."""

    path: Path
    """A Hugging Face folder or a .gguf file; absolute."""
    served_name: str
    """What requests may call it by default: the demo or Hub name, or the folder's or file's own."""


Progress = Callable[[str, float], None]
"""Called with what is being done and how far it is, 0 to 1."""


def no_progress(_stage: str, _fraction: float) -> None:
    """For callers who do not care."""
