"""The CUDA engine on host memory: every launch is carried out by numpy, from the very arguments it packed.

So staging, programs, buffers and the step loop run as they are; only the driver, the kernels and cuBLASLt are
replaced. Launches take effect at once, in the order in which they are enqueued.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

from engine.cuda import engine as cuda_engine
from engine.cuda import loading, planning, programs, regions, step, weight_loading
from engine.cuda.gemm import Epilogue, GemmKey
from engine.cuda.graphs import Eager
from engine.cuda.settings import CudaSettings
from engine.options import EngineOptions
from kernels import launch as kernel_launch
from kernels import tensor_map
from kernels.device import DeviceLimits
from kernels.launch import Kernel
from kernels.tensor import Tensor
from tests.unit import cuda_twin_kernels as twins

HOPPER = DeviceLimits((9, 0), 132, 227 << 10, 50 << 20)
SETTINGS = CudaSettings(tune=False, kernel_folder=None, gemm_folder=None)


LIVE: list[HostThing] = []
"""What has been made and not closed."""


class HostThing:
    """Something of the device that must be given back."""

    def __init__(self) -> None:
        LIVE.append(self)

    def close(self) -> None:
        if self in LIVE:
            LIVE.remove(self)


class HostDevice(HostThing):
    """Allocates host memory, filled with what is NaN in every float type."""

    name = "host twin"
    total_bytes = 1 << 30
    limits = HOPPER

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[int, np.ndarray] = {}

    @classmethod
    def open(cls, index: int) -> HostDevice:
        return cls()

    def allocate(self, size: int) -> int:
        block = np.full(size + 256, 0xFF, np.uint8)
        address = block.ctypes.data + -block.ctypes.data % 256
        self._blocks[address] = block
        return address

    def free(self, address: int) -> None:
        del self._blocks[address]

    def free_bytes(self) -> int:
        return self.total_bytes

    def stream(self, *, priority: int = 0) -> HostStream:
        return HostStream()

    def make_current(self) -> None: ...
    def synchronize(self) -> None: ...

    def close(self) -> None:
        super().close()
        assert not self._blocks, "device memory was not given back"
        if not any(isinstance(thing, HostDevice) for thing in LIVE):
            assert not LIVE, "the last context was closed before what lives in it"


class HostStream(HostThing):
    handle = 1

    def record(self, event: HostEvent) -> None:
        event.recorded += 1

    def copy_to_device(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    copy_to_host = copy_on_device = copy_to_device

    def fill(self, target: int, byte: int, size: int) -> None:
        ctypes.memset(target, byte, size)

    def synchronize(self) -> None: ...


class HostEvent(HostThing):
    def __init__(self, **_: bool) -> None:
        super().__init__()
        self.recorded = 0

    def is_done(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def milliseconds_since(self, earlier: HostEvent) -> float:
        return 1.0


class HostBuffer(HostThing):
    """Pinned memory's stand-in, poisoned."""

    def __init__(self, size: int, **_: bool) -> None:
        super().__init__()
        self.size = size
        self.bytes = np.full(size, 0x7F, np.uint8)
        self.address = self.bytes.ctypes.data

    def array(self, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.bytes[offset : offset + size].view(dtype).reshape(shape)


class HostLibrary(HostThing):
    """Kernels by name, each carried out by its twin."""

    names: ClassVar[list[str]] = []
    """Of all kernels asked for; a kernel's function is its place here."""

    def __init__(self) -> None:
        """Holds nothing of the device until it loads."""

    @classmethod
    def build(cls, *_: object, **__: object) -> HostLibrary:
        return cls()

    def load_all(self) -> None:
        super().__init__()

    def kernel(self, source: str, expression: str, *, dynamic_shared_bytes: int = 0) -> Kernel:
        self.names.append(expression)
        return Kernel(expression, len(self.names), False)

    def blocks_per_multiprocessor(self, *_: object) -> int:
        return 2


def _launch(config: int, function: int, pointers: int, _: int) -> int:
    """In place of cuLaunchKernelEx."""
    grid = kernel_launch._LaunchConfig.from_address(config).grid
    try:
        twins.run(HostLibrary.names[function - 1], tuple(grid), pointers)
    except Exception as error:  # noqa: BLE001 - nothing can be raised through a C call; the fixture does it
        FAILURES.append(error)
    return 0


def _encode(address: int, *_: object) -> tensor_map.TensorMap:
    """In place of the driver's encoder."""
    return tensor_map.TensorMap((ctypes.c_uint64 * 16)(address))


FAILURES: list[Exception] = []


LAUNCH = ctypes.PYFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(_launch)


@dataclass
class HostPlan:
    """A matrix product in float32."""

    key: GemmKey

    def bind(self, *, x: Tensor, w: Tensor, y: Tensor, workspace: Tensor, **others: Tensor | None) -> Any:
        key = self.key
        assert (x.shape, w.shape, y.shape) == ((key.rows, key.k), (key.n, key.k), (key.rows, key.n))
        assert (x.dtype, w.dtype, y.dtype) == (key.x, key.w, key.y)
        bias, c = others.get("bias"), others.get("c")
        assert (bias is not None) == (key.epilogue is Epilogue.BIAS)
        assert (c is not None) == (key.epilogue is Epilogue.ADD)

        def multiply(stream: int) -> None:
            result = twins.view(x).astype(np.float32) @ twins.view(w).astype(np.float32).T
            for added in (bias, c):
                if added is not None:
                    result += twins.view(added).astype(np.float32)
            twins.view(y)[:] = result

        return multiply


class HostPlanner(HostThing):
    library_version = "numpy"

    def __init__(self, device: HostDevice, *, cache_folder: Path | None) -> None:
        super().__init__()
        self.keys: set[GemmKey] = set()
        self.tuned: set[GemmKey] = set()

    def plan_all(self, keys: Sequence[GemmKey], *, scratch: Tensor | None, progress: Any) -> None:
        self.tuned.update(keys)
        progress(1.0)
        if scratch is not None:  # as tuning leaves it: full of what nobody should read
            ctypes.memset(scratch.address, 0xFF, scratch.bytes)

    def plan(self, key: GemmKey) -> HostPlan:
        self.keys.add(key)
        return HostPlan(key)


@pytest.fixture
def load_twin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """load_cuda_engine on host memory: takes EngineOptions and, if need be, CudaSettings."""
    monkeypatch.setattr(kernel_launch, "_driver_launch", lambda: LAUNCH)
    monkeypatch.setattr(tensor_map, "encode", _encode)
    monkeypatch.setattr(loading, "Device", HostDevice)
    monkeypatch.setattr(loading, "KernelLibrary", HostLibrary)
    monkeypatch.setattr(loading, "GemmPlanner", HostPlanner)
    monkeypatch.setattr(planning, "RESERVE_BYTES", 0)
    monkeypatch.setattr(loading, "driver_version", lambda: 13000)
    copy = SimpleNamespace(cuMemcpyHtoD=lambda to, source, size: (ctypes.memmove(to, source, size) and 0,))
    monkeypatch.setattr(loading, "driver", copy)
    monkeypatch.setattr(programs, "Graph", Eager)
    monkeypatch.setattr(regions, "PinnedBuffer", HostBuffer)
    monkeypatch.setattr(weight_loading, "PinnedBuffer", HostBuffer)
    for module in (step, weight_loading):
        monkeypatch.setattr(module, "Event", HostEvent)
    engines: list[cuda_engine.CudaEngine] = []

    def load(options: EngineOptions, settings: CudaSettings = SETTINGS) -> cuda_engine.CudaEngine:
        engines.append(loading.load_cuda_engine(options, None, settings))
        return engines[-1]

    FAILURES.clear()
    LIVE.clear()
    yield load
    for engine in engines:
        engine.close()
    assert not LIVE, "something was not given back"
    if FAILURES:
        raise FAILURES[0]


Loader = Callable[..., cuda_engine.CudaEngine]
BF16 = ml_dtypes.bfloat16
