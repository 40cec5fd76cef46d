"""Reading models from disk: Hugging Face folders and GGUF files behind one interface."""

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.open import open_checkpoint
from engine.checkpoint.tensor import Tensor
from engine.quantization.tensor_type import TensorType

__all__ = ["Checkpoint", "Tensor", "TensorType", "open_checkpoint"]
