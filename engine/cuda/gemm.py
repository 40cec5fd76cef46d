"""Matrix products by cuBLASLt: y = x · Wᵀ (+ bias, or + c). Finds the way to compute each. Knows no model.

A GemmKey names a product, a GemmPlan says how to compute it, and a Gemm is a plan bound to addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from engine.cuda.cublaslt import Algorithm, Library, Product, library_version
from engine.cuda.device import Device
from engine.cuda.gemm_cache import GemmCache, Tuned, default_cache_folder
from engine.cuda.gemm_key import Epilogue, GemmKey
from engine.cuda.gemm_plan import WORKSPACE_BYTES, Gemm, GemmPlan
from engine.cuda.gemm_tuning import Tuner, scratch_bytes
from engine.cuda.owned import Owned
from kernels.tensor import DType, Tensor

__all__ = [
    "WORKSPACE_BYTES",
    "Epilogue",
    "Gemm",
    "GemmKey",
    "GemmPlan",
    "GemmPlanner",
    "default_cache_folder",
]


def least_scratch(keys: Iterable[GemmKey]) -> int:
    """Bytes without which not all of these can be tuned: each with a single copy of its weight."""
    return max((scratch_bytes(key, 1, WORKSPACE_BYTES) for key in keys), default=0)


class GemmPlanner:
    """Finds, tunes and keeps plans for one device. Used from one thread."""

    def __init__(self, device: Device, *, cache_folder: Path | None) -> None:
        """cache_folder: where tuned algorithms are kept between runs; None keeps none."""
        self.device = device
        self.library = Library()
        self.library_version = library_version()
        self.cache = None
        if cache_folder is not None:
            multiprocessors = device.limits.multiprocessors
            self.cache = GemmCache(cache_folder, device.name, multiprocessors, self.library_version)
        self._plans: dict[GemmKey, GemmPlan] = {}
        self._products: dict[GemmKey, Product] = {}
        self._tuned: dict[GemmKey, Tuned] = {}

    def plan(self, key: GemmKey) -> GemmPlan:
        """The plan for a key: tuned, if plan_all has seen it now or in an earlier run, else the heuristic's
        first choice. Allocates no device memory and runs nothing. Raises CudaError if there is no way.
        """
        plan = self._plans.get(key)
        if plan is None:
            product = self._products[key] = Product(key)
            algorithm = self._known(product)
            is_tuned = algorithm is not None
            if algorithm is None:
                algorithm = self.library.candidates(product, 1, WORKSPACE_BYTES)[0]
            plan = GemmPlan(self.library.handle, product, algorithm, is_tuned=is_tuned)
            self._plans[key] = plan
        return plan

    def plan_all(
        self,
        keys: Iterable[GemmKey],
        *,
        scratch: Tensor | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> int:
        """Tunes those keys for which no tuned plan is known, and returns how many those were.

        On an idle device, before any of them is asked for. scratch: u8, device memory to tune in (the KV
        pages before they are used, say); None allocates some for the time. progress: hears the share done.
        Raises CudaError, ValueError if scratch is too small for a product's operands.
        """
        unknown = [key for key in dict.fromkeys(keys) if not self._is_known(key)]
        unknown.sort(key=lambda key: key.flops)  # the heavy ones, which heat the GPU up, come last
        if not unknown:
            return 0
        if scratch is not None:
            self._tune(unknown, scratch, progress)
        else:
            l2_bytes = self.device.limits.l2_bytes
            size = max(scratch_bytes(key, l2_bytes, WORKSPACE_BYTES) for key in unknown)
            with self.device.temporary(size) as address:
                self._tune(unknown, Tensor(address, (size,), DType.U8), progress)
        return len(unknown)

    def _tune(
        self, keys: Sequence[GemmKey], scratch: Tensor, progress: Callable[[float], None] | None
    ) -> None:
        with Owned() as made:
            if self.cache is not None:
                made.then(self.cache.save)
            tuner = made.add(Tuner(self.device, self.library, scratch, WORKSPACE_BYTES))
            for done, key in enumerate(keys, start=1):
                self._tuned[key] = tuned = tuner.tune(key)
                if self.cache is not None:
                    self.cache.put(key, tuned)
                if progress is not None:
                    progress(done / len(keys))

    def _is_known(self, key: GemmKey) -> bool:
        product = Product(key)
        try:
            return self._known(product) is not None
        finally:
            product.close()

    def _known(self, product: Product) -> Algorithm | None:
        """What tuning has found, now or in an earlier run, if the library still takes it."""
        tuned = self._tuned.get(product.key)
        if tuned is None and self.cache is not None:
            tuned = self.cache.get(product.key)
        if tuned is None or tuned.algorithm.workspace > WORKSPACE_BYTES:
            return None
        return tuned.algorithm if self.library.accepts(product, tuned.algorithm) else None

    def close(self) -> None:
        """Idempotent. No plan or Gemm may be used any more."""
        for plan in self._plans.values():
            plan.close()
        self._plans.clear()
        while self._products:
            self._products.popitem()[1].close()
        self.library.close()
