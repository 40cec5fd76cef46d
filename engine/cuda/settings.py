"""Ways of working of the CUDA engine to measure and test with; serving takes the defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from engine.cuda.gemm_cache import default_cache_folder as default_gemm_folder
from kernels.compiler import default_cache_folder as default_kernel_folder
from kernels.tensor import DType


@dataclass(frozen=True, slots=True)
class CudaSettings:
    """Choices beside EngineOptions."""

    decode_widths: tuple[int, ...] | None = None
    """Buckets of decode rows; None takes those of buckets.decode_widths."""
    prefill_sizes: tuple[int, ...] | None = None
    """Buckets of prompt tokens; None takes those of buckets.prefill_sizes."""
    tune: bool = True
    """Time cuBLASLt's algorithms where no tuned one is known; else take the heuristic's first choice."""
    capture: bool = True
    """Capture all graphs while loading; else each when it is first needed."""
    graphs: bool = True
    """Replay graphs; else launch every kernel (to find which one fails)."""
    skinny: bool = True
    """Own kernels for products of at most 8 rows, not cuBLASLt."""
    residual: DType = DType.BF16
    """Of the residual stream; float32 rounds less and moves more."""
    dependent_launch: bool = True
    """Programmatic dependent launch, where the device has it."""
    kernel_folder: Path | None = field(default_factory=default_kernel_folder)
    """Where compiled kernels are kept."""
    gemm_folder: Path | None = field(default_factory=default_gemm_folder)
    """Where tuned algorithms are kept."""
