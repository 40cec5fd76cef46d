"""Reading models from disk: Hugging Face folders and GGUF files behind one interface."""

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.tensor import Tensor
from engine.quantization.types import TensorType

__all__ = ["Checkpoint", "Tensor", "TensorType"]
