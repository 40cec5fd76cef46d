"""Ways to store numbers in few bits, each bit-exact with its public definition. Knows no model."""

from engine.quantization.decode import apply_scale, decode
from engine.quantization.fp8 import Fp8Rows
from engine.quantization.q4_0 import Q4Rows
from engine.quantization.tensor_type import TensorType

__all__ = ["Fp8Rows", "Q4Rows", "TensorType", "apply_scale", "decode"]
