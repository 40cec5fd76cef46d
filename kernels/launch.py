"""Loads compiled kernels into the current CUDA context and launches them with arguments packed once.

A Launch is a kernel with its grid and arguments fixed: calling it enqueues it on a stream, eagerly or
into a graph capture. The driver is called through its own function pointer with prepared structures;
`benchmarks/kernels-h200.md` has the cost beside those of cuda.bindings' and cuda.core's calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cuda.bindings import driver

from kernels.compiler import CompiledUnit, CompileUnit, KernelResources, Progress, compile_units
from kernels.errors import KernelError, KernelLaunchError
from kernels.tensor import Tensor

Scalar = ctypes.c_int32 | ctypes.c_float | ctypes.c_uint64
Argument = Tensor | None | Scalar | ctypes.Structure
"""A kernel argument: a buffer, a null pointer, a number in its C type, or a struct passed by value."""


class Dim3(NamedTuple):
    """Blocks of a grid or threads of a block."""

    x: int
    y: int = 1
    z: int = 1


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a value in a 64-byte union at offset 8."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_int * 3),
        ("rest", ctypes.c_char * 52),
    )


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("n_attributes", ctypes.c_uint),
    )


BROKEN_CONTEXT = frozenset(
    int(code)
    for code in (
        driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,
        driver.CUresult.CUDA_ERROR_LAUNCH_FAILED,
        driver.CUresult.CUDA_ERROR_LAUNCH_TIMEOUT,
        driver.CUresult.CUDA_ERROR_MISALIGNED_ADDRESS,
        driver.CUresult.CUDA_ERROR_ILLEGAL_INSTRUCTION,
        driver.CUresult.CUDA_ERROR_INVALID_ADDRESS_SPACE,
        driver.CUresult.CUDA_ERROR_INVALID_PC,
        driver.CUresult.CUDA_ERROR_HARDWARE_STACK_ERROR,
        driver.CUresult.CUDA_ERROR_ASSERT,
        driver.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE,
        driver.CUresult.CUDA_ERROR_DEVICE_UNAVAILABLE,
    )
)
"""Once work has failed so, every call of its context does: nothing there can be freed, nor need be."""

_MOST_DYNAMIC = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_SHARE = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
"""Percent of a multiprocessor's memory, as a wish."""
_CLUSTER_DIMENSION = 4
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION."""
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""


@cache
def _driver_launch() -> Any:
    """cuLaunchKernelEx as a plain C function. It keeps the GIL: a launch is shorter than giving it up."""
    status, address, _ = driver.cuGetProcAddress(b"cuLaunchKernelEx", 12000, 0)
    if int(status) != 0:
        raise KernelError(f"the driver has no cuLaunchKernelEx (needs CUDA 12 or newer): {status.name}")
    pointer = ctypes.c_void_p
    return ctypes.PYFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer)(int(address))


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loaded kernel of the current context."""

    name: str
    function: int
    """CUfunction."""
    dependent_launch: bool
    """Whether it was written to start before its predecessor ends (it waits for it itself)."""


class Launch:
    """One kernel call, ready to be enqueued any number of times; holds no memory but its own arguments."""

    __slots__ = (
        "_attributes",
        "_config",
        "_config_address",
        "_function",
        "_launch",
        "_pointers",
        "_pointers_address",
        "_values",
        "kernel",
    )

    def __init__(
        self,
        kernel: Kernel,
        grid: Dim3,
        block: Dim3,
        arguments: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        cluster: int = 1,
    ) -> None:
        """cluster: blocks along x that run together (compute capability 9.0 and newer)."""
        self.kernel = kernel
        self._values = [_packed(argument) for argument in arguments]
        self._pointers = (ctypes.c_void_p * len(self._values))(*(ctypes.addressof(v) for v in self._values))
        self._config = _LaunchConfig(tuple(grid), tuple(block), shared_bytes, None, None, 0)
        attributes = []
        if kernel.dependent_launch:
            attributes.append(_LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1, 0, 0)))
        if cluster > 1:
            attributes.append(_LaunchAttribute(_CLUSTER_DIMENSION, 0, (cluster, 1, 1)))
        if attributes:
            self._attributes = (_LaunchAttribute * len(attributes))(*attributes)
            self._config.attributes = ctypes.addressof(self._attributes)
            self._config.n_attributes = len(attributes)
        self._config_address = ctypes.addressof(self._config)
        self._pointers_address = ctypes.addressof(self._pointers)
        self._function = kernel.function
        self._launch = _driver_launch()

    def __call__(self, stream: int) -> None:
        """Enqueues the kernel. stream: a CUstream handle. Raises KernelLaunchError."""
        self._config.stream = stream
        status = self._launch(self._config_address, self._function, self._pointers_address, None)
        if status:
            config = self._config
            shape = f"grid {tuple(config.grid)}, block {tuple(config.block)}, {config.shared_bytes} B shared"
            raise KernelLaunchError(self.kernel.name, shape, error_text(status))


i32 = ctypes.c_int32
f32 = ctypes.c_float


def _packed(argument: Argument) -> Any:
    if argument is None:
        return ctypes.c_uint64(0)
    if isinstance(argument, Tensor):
        return ctypes.c_uint64(argument.address)
    if isinstance(argument, ctypes.Structure):
        return type(argument).from_buffer_copy(argument)
    if isinstance(argument, ctypes.c_float):
        return ctypes.c_float(argument.value)
    return type(argument)(int(argument.value))


def error_text(status: int) -> str:
    """A driver error code's name and description."""
    code = driver.CUresult(status)
    _, text = driver.cuGetErrorString(code)
    return f"{code.name}: {text.decode() if text else 'unknown error'}"


class KernelLibrary:
    """The kernels of some units, compiled and loaded for one device and context.

    Modules load on first use (a few hundred microseconds each); call `load_all` before capturing graphs.
    """

    def __init__(self, compiled: Sequence[CompiledUnit], *, dependent_launch: bool) -> None:
        """dependent_launch: use programmatic dependent launch (compute capability 9.0 and newer)."""
        self._compiled = {
            (unit.unit.source, name): unit for unit in compiled for name in unit.unit.expressions
        }
        self._modules: dict[int, Any] = {}
        self._kernels: dict[tuple[str, str], Kernel] = {}
        self._dependent_launch = dependent_launch
        self._dynamic_shared: dict[tuple[str, str], int] = {}

    @classmethod
    def build(
        cls,
        units: Sequence[CompileUnit],
        arch: str,
        *,
        cache_folder: Path | None,
        threads: int | None = None,
        progress: Progress | None = None,
        dependent_launch: bool | None = None,
    ) -> KernelLibrary:
        """Compiles what the cache lacks. dependent_launch: None takes what the architecture can."""
        compiled = compile_units(units, arch, cache_folder=cache_folder, threads=threads, progress=progress)
        if dependent_launch is None:
            dependent_launch = int(arch.removeprefix("sm_").rstrip("a")) >= 90
        return cls(compiled, dependent_launch=dependent_launch)

    def load_all(self) -> None:
        """Loads every kernel. Raises KernelError."""
        for source, expression in self._compiled:
            self.kernel(source, expression)

    def kernel(self, source: str, expression: str, *, dynamic_shared_bytes: int = 0) -> Kernel:
        """The kernel, allowed at least so much dynamic shared memory. Raises KernelError.

        Kernels that ask for some want most of a multiprocessor's memory to be shared: without that they wait
        for the kernel before to leave it and for its memory to be divided anew. A product, attention and a
        product of one row, with dependent launch: 13.8 µs on an H200, 14.5 as the driver divides it.
        """
        key = (source, expression)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = self._load(source, expression)
        if dynamic_shared_bytes > self._dynamic_shared.get(key, 0):
            for attribute, value in ((_MOST_DYNAMIC, dynamic_shared_bytes), (_SHARED_SHARE, 100)):
                _check(driver.cuFuncSetAttribute(kernel.function, attribute, value), kernel.name)
            self._dynamic_shared[key] = dynamic_shared_bytes
        return kernel

    def resources(self, source: str, expression: str) -> KernelResources:
        """Registers, spills and shared memory of a kernel."""
        return self._compiled[source, expression].resources[expression]

    def blocks_per_multiprocessor(self, kernel: Kernel, threads: int, dynamic_shared_bytes: int) -> int:
        """How many blocks of this size one multiprocessor holds at once."""
        result = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            kernel.function, threads, dynamic_shared_bytes
        )
        return int(_check(result, kernel.name)[0])

    def _load(self, source: str, expression: str) -> Kernel:
        compiled = self._compiled.get((source, expression))
        if compiled is None:
            raise KernelError(f"{expression} of kernels/{source} is not among the compiled kernels")
        module = self._modules.get(id(compiled))
        if module is None:
            (module,) = _check(driver.cuModuleLoadData(compiled.cubin), compiled.unit.name)
            self._modules[id(compiled)] = module
        symbol = compiled.lowered_names[expression].encode()
        (function,) = _check(driver.cuModuleGetFunction(module, symbol), expression)
        return Kernel(expression, int(function), self._dependent_launch)

    def close(self) -> None:
        """Unloads the modules. Launches and graphs made of them must be gone. Idempotent.

        Silent in a context that earlier work has broken. Raises KernelError, once all have been tried.
        """
        self._kernels.clear()
        results = []
        while self._modules:
            results.append(driver.cuModuleUnload(self._modules.popitem()[1]))
        for result in results:
            if int(result[0]) not in BROKEN_CONTEXT:
                _check(result, "module unload")


def _check(result: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    status, *values = result
    if int(status) != 0:
        raise KernelError(f"{what}: {error_text(int(status))}")
    return tuple(values)
