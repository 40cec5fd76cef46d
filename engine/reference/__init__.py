"""The numpy engine: what serves on a machine without a GPU, and what every CUDA kernel is judged by."""

from engine.reference.engine import ReferenceEngine

__all__ = ["ReferenceEngine"]
