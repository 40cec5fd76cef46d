"""The engine's kernels, for the command line: what there is, and compiling it ahead. Loads CUDA's compiler
only when asked.
"""

from __future__ import annotations

from engine.kernel_catalog import (
    KernelBuild,
    KernelEntry,
    KernelProgress,
    all_architectures,
    build_kernels,
    default_architectures,
    kernel_cache_folder,
    list_kernels,
)

__all__ = [
    "KernelBuild",
    "KernelEntry",
    "KernelProgress",
    "all_architectures",
    "build_kernels",
    "default_architectures",
    "kernel_cache_folder",
    "list_kernels",
]
