"""A model's name to files on this machine: local paths, demo models, the Hugging Face Hub."""

from service.models.demo import DEMO_MODELS
from service.models.resolve import resolve_model
from service.models.types import ModelNotFound, Progress, ResolvedModel

__all__ = ["DEMO_MODELS", "ModelNotFound", "Progress", "ResolvedModel", "resolve_model"]
