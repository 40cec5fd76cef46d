"""What a model is: its layers as data, read from Hugging Face or GGUF metadata. Reads no weights."""

from engine.config.model import (
    Activation,
    AttentionSpec,
    DeltaNetSpec,
    DenseSpec,
    FeedForward,
    LayerSpec,
    Mixer,
    ModelConfig,
    MoESpec,
    NormSpec,
)
from engine.config.rope import RopeKind, RopeSpec
from engine.config.tensors import expected_tensors
from engine.config.weights import WeightFormat, WeightScheme

__all__ = [
    "Activation",
    "AttentionSpec",
    "DeltaNetSpec",
    "DenseSpec",
    "FeedForward",
    "LayerSpec",
    "Mixer",
    "MoESpec",
    "ModelConfig",
    "NormSpec",
    "RopeKind",
    "RopeSpec",
    "WeightFormat",
    "WeightScheme",
    "expected_tensors",
]
