"""A GPU for kernel tests: device memory, compiled kernels, poisoned outputs, comparison in float64.

Outputs start as bytes of 0xFF: NaN for floats, −1 for integers. So an element that a kernel forgot shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from cuda.bindings import driver

from kernels.compiler import CompileUnit, default_cache_folder
from kernels.device import DeviceLimits, query_limits
from kernels.launch import KernelLibrary, Launch
from kernels.registry import all_units
from kernels.tensor import DType, Tensor

NUMPY_TYPES: dict[DType, Any] = {
    DType.BF16: ml_dtypes.bfloat16,
    DType.F16: np.float16,
    DType.E4M3: ml_dtypes.float8_e4m3fn,
    DType.F32: np.float32,
    DType.I32: np.int32,
    DType.U32: np.uint32,
    DType.U64: np.uint64,
    DType.U8: np.uint8,
}
_DTYPES = {np.dtype(numpy_type): dtype for dtype, numpy_type in NUMPY_TYPES.items()}
BF16 = ml_dtypes.bfloat16
Buffers = TypeVar("Buffers")


def check(result: Any) -> Any:
    """The values of a driver call. Raises AssertionError with the driver's reason."""
    status, *values = result if isinstance(result, tuple) else (result,)
    assert int(status) == 0, f"{driver.cuGetErrorString(status)[1].decode()} ({status.name})"
    return values[0] if len(values) == 1 else values


class Gpu:
    """Device 0 with its primary context current."""

    def __init__(self, units: Iterable[CompileUnit] | None = None) -> None:
        check(driver.cuInit(0))
        device = check(driver.cuDeviceGet(0))
        context = check(driver.cuDevicePrimaryCtxRetain(device))
        check(driver.cuCtxSetCurrent(context))
        self.limits: DeviceLimits = query_limits(0)
        self.library = KernelLibrary.build(
            tuple(units or all_units()), self.limits.arch, cache_folder=default_cache_folder()
        )
        self.stream = int(check(driver.cuStreamCreate(1)))
        self._allocated: list[int] = []

    def empty(self, shape: tuple[int, ...], dtype: DType, *, fill: int = 0xFF) -> Tensor:
        """A buffer whose bytes are all `fill`."""
        tensor = Tensor(0, tuple(int(n) for n in shape), dtype)
        address = int(check(driver.cuMemAlloc(max(16, tensor.bytes))))
        self._allocated.append(address)
        # In the launches' own stream, which does not wait for others.
        check(driver.cuMemsetD8Async(address, fill, max(16, tensor.bytes), self.stream))
        return dataclasses.replace(tensor, address=address)

    def upload(self, array: np.ndarray) -> Tensor:
        """A device copy."""
        array = np.ascontiguousarray(array)
        tensor = self.empty(array.shape, _DTYPES[array.dtype])
        if array.nbytes:
            self.write(tensor, array)
        return tensor

    def write(self, tensor: Tensor, array: np.ndarray) -> None:
        """Overwrites a buffer."""
        array = np.ascontiguousarray(array)
        assert array.nbytes == tensor.bytes
        check(driver.cuMemcpyHtoDAsync(tensor.address, array.ctypes.data, array.nbytes, self.stream))
        self.synchronize()

    def download(self, tensor: Tensor) -> np.ndarray:
        """A host copy, after all work is done."""
        self.synchronize()
        array = np.empty(tensor.shape, NUMPY_TYPES[tensor.dtype])
        check(driver.cuMemcpyDtoH(array.ctypes.data, tensor.address, array.nbytes))
        return array

    def buffers(self, kind: Callable[..., Buffers], shapes: dict[str, Any], *, fill: int = 0xFF) -> Buffers:
        """A dataclass of buffers from its table of shapes and types."""
        return kind(**{name: self.empty(shape, dtype, fill=fill) for name, (shape, dtype) in shapes.items()})

    def run(self, *launches: Launch) -> None:
        """Enqueues and waits, so that a fault names the test."""
        for launch in launches:
            launch(self.stream)
        self.synchronize()

    def synchronize(self) -> None:
        check(driver.cuStreamSynchronize(self.stream))

    def release(self) -> None:
        """Frees the buffers."""
        self.synchronize()
        while self._allocated:
            check(driver.cuMemFree(self._allocated.pop()))


def random_bf16(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(BF16)


def assert_close(name: str, got: np.ndarray, want: np.ndarray, *, rtol: float, atol: float) -> None:
    """Every element within atol + rtol·|want|; names the first that is not. NaN never passes."""
    got64, want64 = got.astype(np.float64), want.astype(np.float64)
    assert got64.shape == want64.shape
    bad = ~(np.abs(got64 - want64) <= atol + rtol * np.abs(want64))
    if not bad.any():
        return
    first = tuple(int(i) for i in np.argwhere(bad)[0])
    norm = np.linalg.norm(np.nan_to_num(got64 - want64)) / max(np.linalg.norm(want64), 1e-30)
    raise AssertionError(
        f"{name}: {int(bad.sum())} of {bad.size} differ, first at {first}: got {got64[first]}, "
        f"want {want64[first]}; relative difference {norm:.2e}"
    )


def assert_untouched(name: str, array: np.ndarray) -> None:
    """All bytes are still the poison."""
    raw = np.ascontiguousarray(array).view(np.uint8)
    assert (raw == 0xFF).all(), f"{name} was written"


class PagedCase:
    """Sequences with random KV in shuffled pages. Entries past each context are NaN, spare pages too."""

    def __init__(
        self, rng: np.random.Generator, contexts: list[int], n_kv_heads: int, head_dim: int, spare: int = 2
    ) -> None:
        needed = [-(-context // 64) for context in contexts]
        pages = sum(needed) + spare
        self.contexts = contexts
        order = rng.permutation(pages)
        self.block_table = np.full((len(contexts), max(needed) + 1), -1, np.int32)
        self.keys = [random_bf16(rng, c, n_kv_heads, head_dim) for c in contexts]
        self.values = [random_bf16(rng, c, n_kv_heads, head_dim) for c in contexts]
        self.k_pages = np.full((pages, n_kv_heads, 64, head_dim), np.nan, BF16)
        self.v_pages = np.full((pages, n_kv_heads, 64, head_dim), np.nan, BF16)
        used = 0
        for slot, context in enumerate(contexts):
            for index in range(needed[slot]):
                page = order[used]
                used += 1
                self.block_table[slot, index] = page
                span = slice(index * 64, min(context, index * 64 + 64))
                count = span.stop - span.start
                self.k_pages[page, :, :count] = self.keys[slot][span].transpose(1, 0, 2)
                self.v_pages[page, :, :count] = self.values[slot][span].transpose(1, 0, 2)


def attention_reference(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    position: int,
    scale: float,
    window: int | None,
) -> np.ndarray:
    """One row in float64. query [n_heads, head_dim]; keys, values [context, n_kv_heads, head_dim]."""
    first = 0 if window is None else max(0, position - window + 1)
    k = keys[first : position + 1].astype(np.float64)
    v = values[first : position + 1].astype(np.float64)
    group = query.shape[0] // k.shape[1]
    q = query.astype(np.float64).reshape(k.shape[1], group, -1)
    scores = np.einsum("hgd,khd->hgk", q, k) * scale
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hgk,khd->hgd", weights, v).reshape(query.shape)
