"""The few cuBLASLt calls that matrix products need, in row-major terms. Knows no tuning and no cache.

cuBLASLt is column-major: row-major y[rows, n] is its D[n, rows], W[n, k] its A[k, n] taken transposed, and
x[rows, k] its B[k, rows].
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvmath.bindings import cublasLt
from nvmath.bindings.cublas import ComputeType

from engine.cuda.device import CudaError
from engine.cuda.gemm_key import Epilogue, GemmKey
from kernels.tensor import DType

OPERAND_ALIGNMENT = 16
"""Bytes; what algorithms may assume of every operand's address."""

_CUDA_R_32F = 0
_TYPES = {DType.F32: _CUDA_R_32F, DType.BF16: 14, DType.E4M3: 28}
"""cudaDataType_t."""
_EPILOGUES = {
    Epilogue.NONE: cublasLt.Epilogue.DEFAULT,
    Epilogue.BIAS: cublasLt.Epilogue.BIAS,
    Epilogue.ADD: cublasLt.Epilogue.DEFAULT,
}
_TRANSPOSED = 1
_NOT_SUPPORTED = 15
"""CUBLAS_STATUS_NOT_SUPPORTED: the heuristic's way of saying that it has nothing."""
_ALIGNED = 256
"""An address to plan with where a bias is added; nothing is read from it."""

DETERMINISTIC_REDUCTIONS = int(cublasLt.ReductionScheme.COMPUTE_TYPE)
"""Split-K sums in float32 in the workspace, added in a fixed order. The others round partial sums to the
output's type, or accumulate in the output itself."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An opaque cublasLtMatmulAlgo_t: 64 bytes that mean something to one version of the library only."""

    words: tuple[int, ...]
    """Eight unsigned 64-bit numbers."""
    workspace: int
    """Bytes that it needs."""

    def array(self) -> NDArray[np.uint64]:
        """The 64 bytes, to be kept alive for as long as their address is in use."""
        return np.array(self.words, np.uint64)

    def config(self) -> dict[str, int]:
        """What the library says about it: tile, stages, split-K and so on."""
        attributes = cublasLt.MatmulAlgoConfigAttribute
        words = self.array()
        return {
            name.lower(): _config_attribute(words, getattr(attributes, name))
            for name in ("ID", "TILE_ID", "STAGES_ID", "SPLITK_NUM", "REDUCTION_SCHEME", "CTA_SWIZZLING",
                         "CUSTOM_OPTION", "INNER_SHAPE_ID", "CLUSTER_SHAPE_ID")
        }  # fmt: skip


def _config_attribute(words: NDArray[np.uint64], attribute: int) -> int:
    value, written = ctypes.c_uint64(0), ctypes.c_size_t(0)
    size = np.dtype(cublasLt.get_matmul_algo_config_attribute_dtype(attribute)).itemsize
    cublasLt.matmul_algo_config_get_attribute(
        words.ctypes.data, attribute, ctypes.addressof(value), size, ctypes.addressof(written)
    )
    return int(value.value)


def library_version() -> str:
    """cuBLASLt's, such as "13.1.0"."""
    version = int(cublasLt.get_version())
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


class Library:
    """A cuBLASLt handle of the current context."""

    def __init__(self) -> None:
        self.handle = int(cublasLt.create())

    def close(self) -> None:
        """Idempotent."""
        if self.handle:
            cublasLt.destroy(self.handle)
            self.handle = 0

    def candidates(
        self, product: Product, count: int, workspace: int, *, reductions: int = DETERMINISTIC_REDUCTIONS
    ) -> list[Algorithm]:
        """Algorithms for a product, the heuristic's favourite first; none needs more workspace.

        The library names 8 at most, and among them only split-K ones where it favours these. So it is asked
        again for those that need no workspace: of these comes the best for 1×4096×4096 (11.9 against 13.4 µs)
        and for 64×4096×12288 (29.6 against 31.9). Other split-K counts than it names have won nothing.

        count: of each asking. reductions: the split-K schemes allowed, as bits. Raises CudaError if there is
        none.
        """
        found = self._heuristic(product, count, workspace, reductions)
        found += self._heuristic(product, count, 0, reductions)
        if not found:
            raise CudaError(f"finding an algorithm for {product.key}", 0, "cuBLASLt has none")
        return list(dict.fromkeys(found))

    def _heuristic(self, product: Product, count: int, workspace: int, reductions: int) -> list[Algorithm]:
        """What the library proposes with so much workspace; nothing if it has nothing."""
        preference = int(cublasLt.matmul_preference_create())
        attributes = cublasLt.MatmulPreferenceAttribute
        try:
            _set_preference(preference, attributes.MAX_WORKSPACE_BYTES, ctypes.c_uint64(workspace))
            _set_preference(preference, attributes.REDUCTION_SCHEME_MASK, ctypes.c_uint32(reductions))
            for operand in ("A", "B", "C", "D"):
                alignment = getattr(attributes, f"MIN_ALIGNMENT_{operand}_BYTES")
                _set_preference(preference, alignment, ctypes.c_uint32(OPERAND_ALIGNMENT))
            return self._proposed(product, count, preference)
        finally:
            cublasLt.matmul_preference_destroy(preference)

    def _proposed(self, product: Product, count: int, preference: int) -> list[Algorithm]:
        results = np.zeros(count, cublasLt.matmul_heuristic_result_dtype)
        found = ctypes.c_int(0)
        y = product.y_layout
        try:
            cublasLt.matmul_algo_get_heuristic(
                self.handle, product.operation, product.w_layout, product.x_layout, y, y, preference, count,
                results.ctypes.data, ctypes.addressof(found),
            )  # fmt: skip
        except cublasLt.cuBLASLtError as error:
            if int(getattr(error, "status", 0)) == _NOT_SUPPORTED:
                return []
            raise _failure(f"finding an algorithm for {product.key}", error) from error
        usable = [result for result in results[: found.value] if int(result["state"]) == 0]
        return [_algorithm(result["algo"], int(result["workspace_size"])) for result in usable]

    def accepts(self, product: Product, algorithm: Algorithm) -> bool:
        """Whether the library knows this algorithm for this product.

        How much workspace it then names is no matter: some would like four bytes more than they need.
        """
        result = np.zeros(1, cublasLt.matmul_heuristic_result_dtype)
        words = algorithm.array()
        y = product.y_layout
        try:
            cublasLt.matmul_algo_check(
                self.handle, product.operation, product.w_layout, product.x_layout, y, y,
                words.ctypes.data, result.ctypes.data,
            )  # fmt: skip
        except cublasLt.cuBLASLtError:
            return False
        return int(result[0]["state"]) == 0


class Product:
    """The descriptors of one key: the operation and the layouts of W, x and y."""

    def __init__(self, key: GemmKey) -> None:
        """Raises ValueError for types it does not know, and for e4m3 of sizes that cannot be."""
        unknown = [dtype.value for dtype in (key.x, key.w, key.y) if dtype not in _TYPES]
        if unknown:
            raise ValueError(f"{key}: no matrix products of {', '.join(unknown)}")
        if key.misfit is not None:
            raise ValueError(f"{key}: {key.misfit}")
        self.key = key
        self.w_layout = int(cublasLt.matrix_layout_create(_TYPES[key.w], key.k, key.n, key.k))
        self.x_layout = int(cublasLt.matrix_layout_create(_TYPES[key.x], key.k, key.rows, key.k))
        self.y_layout = int(cublasLt.matrix_layout_create(_TYPES[key.y], key.n, key.rows, key.n))
        self.operation = operation(key, _ALIGNED)

    def close(self) -> None:
        """Idempotent."""
        if self.operation:
            cublasLt.matmul_desc_destroy(self.operation)
            for layout in (self.w_layout, self.x_layout, self.y_layout):
                cublasLt.matrix_layout_destroy(layout)
            self.operation = 0


def operation(key: GemmKey, bias: int) -> int:
    """A new operation descriptor, for destroy_operation to end."""
    descriptor = int(cublasLt.matmul_desc_create(int(ComputeType.COMPUTE_32F), _CUDA_R_32F))
    attributes = cublasLt.MatmulDescAttribute
    _set_operation(descriptor, attributes.TRANSA, ctypes.c_int32(_TRANSPOSED))
    if key.is_fp8:
        _set_operation(descriptor, attributes.FAST_ACCUM, ctypes.c_int8(key.accumulates_fast))
    _set_operation(descriptor, attributes.EPILOGUE, ctypes.c_uint32(int(_EPILOGUES[key.epilogue])))
    if key.epilogue is Epilogue.BIAS:
        _set_operation(descriptor, attributes.BIAS_DATA_TYPE, ctypes.c_int32(_TYPES[key.y]))
        _set_operation(descriptor, attributes.BIAS_POINTER, ctypes.c_uint64(bias))
    return descriptor


def destroy_operation(descriptor: int) -> None:
    cublasLt.matmul_desc_destroy(descriptor)


def matmul_error(key: GemmKey, error: Exception) -> CudaError:
    """What to raise when enqueueing a product failed."""
    return _failure(f"matrix product {key}", error)


def _failure(what: str, error: Exception) -> CudaError:
    return CudaError(what, int(getattr(error, "status", 0)), f"cuBLASLt {library_version()}: {error}")


def _algorithm(record: Any, workspace: int) -> Algorithm:
    return Algorithm(tuple(int(word) for word in record["data_"]), workspace)


def _set_operation(descriptor: int, attribute: int, value: Any) -> None:
    cublasLt.matmul_desc_set_attribute(
        descriptor, int(attribute), ctypes.addressof(value), ctypes.sizeof(value)
    )


def _set_preference(preference: int, attribute: int, value: Any) -> None:
    cublasLt.matmul_preference_set_attribute(
        preference, int(attribute), ctypes.addressof(value), ctypes.sizeof(value)
    )
