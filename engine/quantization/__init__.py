"""Ways to store numbers in few bits, each bit-exact with its public definition. Knows no model."""

from engine.quantization.decode import apply_scale, decode
from engine.quantization.types import TensorType

__all__ = ["TensorType", "apply_scale", "decode"]
