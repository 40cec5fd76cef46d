"""What a model family is: who reads its configuration, and how its tensors are called.

To add one: write a function from a Section to a ModelConfig in a mapping file (llama.py is the pattern),
list it in that file's FAMILIES with the tensor names that differ from engine.checkpoint.naming, and, for
a new file, add it to FAMILIES in hugging_face.py. A new kind of layer is a new mixer in model.py, with
its tensors in tensors.py, and each engine's code for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.config.model import ModelConfig
from engine.config.reader import Section


@dataclass(frozen=True, slots=True)
class Family:
    """One mapping from a configuration to a ModelConfig."""

    name: str
    model_types: tuple[str, ...]
    """`model_type` of the (text) configuration."""
    architectures: tuple[str, ...]
    """`architectures` entries of checkpoints with such a text model, wrappers included."""
    read: Callable[[Section, str], ModelConfig]
    """(text configuration, architecture) → ModelConfig. Raises ConfigError."""
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    """Canonical → own names where they differ from the common ones; see engine.checkpoint.naming."""
