"""A model's name to files on this machine: local paths, demo models, the Hugging Face Hub."""

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

DEMO_MODELS: tuple[str, ...] = ("smollm2-135m-instruct", "smollm2-135m", "demo")
"""Names that need no account and no Hub."""


def resolve_model(name: str, *, progress: Progress | None = None, revision: str | None = None) -> ResolvedModel:
    """Finds the model, downloading it if need be. Blocks; raises ModelNotFound."""
    raise NotImplementedError
