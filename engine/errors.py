"""What can be wrong with a model on disk, or with compiling kernels.

Messages are whole sentences that a user can act on.
"""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be used; str() is one clear message, fit to be shown without a traceback."""


class ConfigError(ModelError):
    """config.json (or GGUF metadata) is malformed: a key is missing, of the wrong type or absurd."""


class UnsupportedModelError(ConfigError):
    """A well-formed model that this engine does not implement; names what, and what is supported."""


class CheckpointError(ModelError):
    """Weights are missing, truncated, malformed or of the wrong shape or type."""


class KernelToolsError(Exception):
    """Kernels cannot be compiled here, or one does not compile; str() is fit to be shown."""
