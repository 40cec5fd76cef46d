"""Ways of working of the CUDA engine to measure and test with; serving takes the defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from engine.cuda.gemm_cache import default_cache_folder as default_gemm_folder
from engine.options import StepSizes
from kernels.compiler import default_cache_folder as default_kernel_folder

SUITED_SIZES = StepSizes(max_sequences=64, max_step_tokens=8192, prefill_tokens_beside_decodes=256)
"""What serving takes where nothing is said. A slot costs 4 bytes of counts, and 4 of logits, for each token
of the vocabulary: 78 MB for 64 slots of 152 k. Passes of 8,192 tokens instead of 2,048 prefill the 1.7B shape
at 183 k tokens/s instead of 161 k, the 8B shape at 42 k instead of 41 k. 256 tokens of a prompt take about
1.5 ms and 6 ms there, next to decode steps of 64 rows that take 2.3 ms and 5.6 ms: so a running stream's pace
about halves (benchmarks/engine-h200.md)."""


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
    dependent_launch: bool = True
    """Programmatic dependent launch, where the device has it."""
    kernel_folder: Path | None = field(default_factory=default_kernel_folder)
    """Where compiled kernels are kept."""
    gemm_folder: Path | None = field(default_factory=default_gemm_folder)
    """Where tuned algorithms are kept."""
