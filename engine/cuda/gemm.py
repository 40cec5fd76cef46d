"""Matrix products by cuBLASLt: y = x · Wᵀ (+ bias, or + c). Descriptors, algorithm and workspace are settled
before a graph is captured and outlive it. Knows no model.

A GemmKey names a product, a GemmPlan says how to compute it, and a Gemm is a plan bound to addresses:
calling it with a stream enqueues it, as a kernel's Launch does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from engine.cuda.device import Device
from kernels.tensor import DType, Tensor

WORKSPACE_BYTES = 32 << 20
"""Of each stream's workspace: what cuBLAS itself takes on Hopper."""


class Epilogue(StrEnum):
    """What happens to the product before it is rounded to the output's type."""

    NONE = "none"
    BIAS = "bias"
    """+ bias bf16 [n]."""
    ADD = "add"
    """+ c [rows, n] of y's type; c may be y itself."""


@dataclass(frozen=True, slots=True)
class GemmKey:
    """A product: y[rows, n] = x[rows, k] · W[n, k]ᵀ, all row-major and contiguous, float32 sums."""

    rows: int
    n: int
    k: int
    x: DType = DType.BF16
    w: DType = DType.BF16
    y: DType = DType.BF16
    """bf16 or float32."""
    epilogue: Epilogue = Epilogue.NONE


class Gemm:
    """A product of fixed buffers, ready to be enqueued any number of times, eagerly or into a capture."""

    def __call__(self, stream: int) -> None:
        """stream: a CUstream handle. Raises CudaError with the product's key."""
        raise NotImplementedError


class GemmPlan:
    """How to compute one key: descriptors and algorithm. Made by GemmPlanner, which must outlive it."""

    key: GemmKey

    def bind(
        self,
        *,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        workspace: Tensor,
        bias: Tensor | None = None,
        c: Tensor | None = None,
    ) -> Gemm:
        """workspace: u8 [WORKSPACE_BYTES], of the one stream this Gemm will run on.

        Raises ValueError for buffers that do not fit the key.
        """
        raise NotImplementedError


class GemmPlanner:
    """Finds, tunes and keeps plans for one device. Used from one thread."""

    def __init__(self, device: Device, *, cache_folder: Path | None) -> None:
        """cache_folder: where tuned algorithms are kept between runs; None keeps none."""

    def plan(self, key: GemmKey) -> GemmPlan:
        """The plan for a key: tuned before, from the disk cache, or tuned now."""
        raise NotImplementedError

    def plan_all(
        self, keys: Iterable[GemmKey], *, scratch: Tensor | None = None, progress: Callable[[float], None] | None = None
    ) -> None:
        """Tunes what is not cached. scratch: device memory to tune in (the KV pages before they are used,
        say); None allocates some for the time."""

    def close(self) -> None:
        """Idempotent. No plan or Gemm may be used any more."""
