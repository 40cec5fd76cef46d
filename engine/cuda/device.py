"""The GPU: which one, its context, streams, events and pinned host memory. Knows no model.

Nothing happens at import. `why_no_gpu` asks the driver without creating a context, so that any process may
call it; `Device.open` makes the primary context and belongs in the process that runs the engine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import driver
from numpy.typing import DTypeLike, NDArray

from engine.errors import ModelError
from engine.interface import EngineError
from kernels.device import DeviceLimits, query_limits
from kernels.errors import KernelError
from kernels.launch import BROKEN_CONTEXT, error_text

OLDEST_CAPABILITY = (8, 0)
"""bf16 tensor cores and cp.async."""
OLDEST_DRIVER = 13000
"""The CUDA version, as 1000·major + 10·minor, that the driver must support to load what NVRTC 13 compiles."""

_GIBIBYTE = 1 << 30


class CudaError(EngineError):
    """A CUDA call failed. Carries what was being done and the driver's code."""

    def __init__(self, what: str, status: int, reason: str) -> None:
        self.what = what
        self.status = status
        self.reason = reason
        super().__init__(f"{what} failed: {reason}")


class OutOfDeviceMemory(CudaError):
    """The device has less free memory than was asked for."""


def check(result: Any, what: str) -> Any:
    """The values of a driver call: none, one, or a tuple. Raises CudaError (OutOfDeviceMemory)."""
    status, *values = result
    code = int(status)
    if code:
        kind = OutOfDeviceMemory if code == int(driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY) else CudaError
        raise kind(what, code, error_text(code))
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def check_freed(result: Any, what: str) -> None:
    """As check, of a call that gives something back. Silent in a context that earlier work has broken:
    whoever waits for that work is told, and this call would only tell it again.
    """
    if int(result[0]) not in BROKEN_CONTEXT:
        check(result, what)


@dataclass(frozen=True, slots=True)
class GpuSummary:
    """A visible GPU, as asked of the driver without a context."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    total_bytes: int

    def __str__(self) -> str:
        major, minor = self.compute_capability
        return f"{self.index}: {self.name} ({major}.{minor}, {self.total_bytes / _GIBIBYTE:.0f} GiB)"


def visible_gpus() -> list[GpuSummary]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, or MIG slices. Raises ModelError without a driver."""
    _start_driver()
    return [_summary(index) for index in range(check(driver.cuDeviceGetCount(), "counting the GPUs"))]


def why_no_gpu(index: int = 0) -> str | None:
    """What stands in the way of using GPU `index`, as the end of a sentence; None if nothing does."""
    try:
        choose_gpu(index)
    except (ModelError, CudaError) as error:
        return str(error)
    return None


def choose_gpu(index: int) -> GpuSummary:
    """The visible GPU of that index. Raises ModelError, saying what there is, if it cannot be used."""
    gpus = visible_gpus()
    if not gpus:
        raise ModelError("there is no NVIDIA GPU that this process can see")
    if not 0 <= index < len(gpus):
        raise ModelError(f"there is no GPU {index}; visible are {', '.join(map(str, gpus))}")
    chosen = gpus[index]
    if chosen.compute_capability < OLDEST_CAPABILITY:
        needed = "{}.{}".format(*OLDEST_CAPABILITY)
        raise ModelError(f"GPU {chosen} is too old: compute capability {needed} or newer is needed")
    return chosen


def _start_driver() -> None:
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:
        raise ModelError(f"the NVIDIA driver cannot be loaded ({error})") from error
    if status == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        raise ModelError("there is no NVIDIA GPU that this process can see")
    if int(status):
        raise ModelError(f"the NVIDIA driver does not start ({error_text(int(status))})")
    version = driver_version()
    if version < OLDEST_DRIVER:
        raise ModelError(
            f"the NVIDIA driver supports CUDA {cuda_version_text(version)}; "
            f"{cuda_version_text(OLDEST_DRIVER)} or newer is needed"
        )


def driver_version() -> int:
    """The newest CUDA version that the driver supports, as 1000·major + 10·minor."""
    return int(check(driver.cuDriverGetVersion(), "asking for the driver's version"))


def cuda_version_text(version: int) -> str:
    """ "13.0" of 13000."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _summary(index: int) -> GpuSummary:
    attributes = driver.CUdevice_attribute
    handle = check(driver.cuDeviceGet(index), f"opening GPU {index}")
    name = check(driver.cuDeviceGetName(128, handle), f"naming GPU {index}")
    major, minor = (
        int(check(driver.cuDeviceGetAttribute(attribute, handle), f"asking GPU {index} for its capability"))
        for attribute in (
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    total = check(driver.cuDeviceTotalMem(handle), f"asking GPU {index} for its memory")
    return GpuSummary(index, name.split(b"\0")[0].decode(), (major, minor), int(total))


class Event:
    """A point in a stream."""

    __slots__ = ("handle",)

    def __init__(self, *, timing: bool = False, blocking: bool = False) -> None:
        """timing: it can be subtracted from another. blocking: synchronize() sleeps instead of spinning."""
        flags = 0 if timing else int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        if blocking:
            flags |= int(driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC)
        self.handle = int(check(driver.cuEventCreate(flags), "creating an event"))

    def is_done(self) -> bool:
        """Whether all work before it has run. An event never recorded is done. Raises CudaError."""
        (status,) = driver.cuEventQuery(self.handle)
        if status == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        check((status,), "work on the GPU")
        return True

    def synchronize(self) -> None:
        """Waits. Raises CudaError if the work before it failed."""
        check(driver.cuEventSynchronize(self.handle), "work on the GPU")

    def milliseconds_since(self, earlier: Event) -> float:
        """Both recorded, done, and made with timing."""
        return float(check(driver.cuEventElapsedTime(earlier.handle, self.handle), "timing"))

    def close(self) -> None:
        """Idempotent."""
        handle, self.handle = self.handle, 0
        if handle:
            check_freed(driver.cuEventDestroy(handle), "destroying an event")


class Stream:
    """An ordered queue of GPU work. Made by Device.stream()."""

    __slots__ = ("handle",)

    def __init__(self, handle: int) -> None:
        self.handle = handle
        """CUstream, as launches take it."""

    def record(self, event: Event) -> None:
        """The event is done once all work enqueued so far is."""
        check(driver.cuEventRecord(event.handle, self.handle), "recording an event")

    def wait(self, event: Event) -> None:
        """Work enqueued from now on waits for the event."""
        check(driver.cuStreamWaitEvent(self.handle, event.handle, 0), "waiting for an event")

    def copy_to_device(self, target: int, source: int, size: int) -> None:
        """Enqueues a copy from host memory, which must be pinned for the call to return before it is read."""
        check(driver.cuMemcpyHtoDAsync(target, source, size, self.handle), f"copying {size} B to the GPU")

    def copy_to_host(self, target: int, source: int, size: int) -> None:
        """Enqueues a copy into pinned host memory."""
        check(driver.cuMemcpyDtoHAsync(target, source, size, self.handle), f"copying {size} B from the GPU")

    def copy_on_device(self, target: int, source: int, size: int) -> None:
        check(driver.cuMemcpyDtoDAsync(target, source, size, self.handle), f"copying {size} B on the GPU")

    def fill(self, target: int, byte: int, size: int) -> None:
        """Enqueues setting `size` bytes to `byte`."""
        check(driver.cuMemsetD8Async(target, byte, size, self.handle), f"filling {size} B on the GPU")

    def synchronize(self) -> None:
        """Waits for all of it. Raises CudaError if any of it failed."""
        check(driver.cuStreamSynchronize(self.handle), "work on the GPU")

    def close(self) -> None:
        """Idempotent."""
        handle, self.handle = self.handle, 0
        if handle:
            check_freed(driver.cuStreamDestroy(handle), "destroying a stream")


class PinnedBuffer:
    """Page-locked host memory, which the GPU copies from and to without the host's help."""

    def __init__(self, size: int, *, write_combined: bool = False) -> None:
        """write_combined: the host only ever writes it, in order (reading it is very slow)."""
        flags = int(driver.CU_MEMHOSTALLOC_PORTABLE)
        if write_combined:
            flags |= int(driver.CU_MEMHOSTALLOC_WRITECOMBINED)
        self.size = size
        self.address = int(check(driver.cuMemHostAlloc(size, flags), f"pinning {size} B of host memory"))
        self.bytes: NDArray[np.uint8] = np.ctypeslib.as_array(
            (ctypes.c_uint8 * size).from_address(self.address)
        )

    def array(self, shape: tuple[int, ...], dtype: DTypeLike, offset: int = 0) -> NDArray[Any]:
        """A view of the bytes from `offset` on. Raises ValueError beyond the end."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if offset < 0 or offset + size > self.size:
            raise ValueError(f"{size} B at {offset} of a pinned buffer of {self.size} B")
        return self.bytes[offset : offset + size].view(dtype).reshape(shape)

    def close(self) -> None:
        """Idempotent. Views must not be used any more."""
        address, self.address = self.address, 0
        if address:
            self.bytes = np.empty(0, np.uint8)
            check_freed(driver.cuMemFreeHost(address), "freeing pinned memory")


class Device:
    """One GPU with its primary context, current in the thread that opened it."""

    def __init__(self, summary: GpuSummary, handle: Any, context: Any) -> None:
        self.index = summary.index
        self.name = summary.name
        self.total_bytes = summary.total_bytes
        self._handle = handle
        self._context = context
        try:
            self.limits: DeviceLimits = query_limits(summary.index)
        except KernelError as error:
            raise EngineError(str(error)) from error

    @classmethod
    def open(cls, index: int = 0) -> Device:
        """Creates the context of visible GPU `index`. Raises ModelError if it cannot be used."""
        summary = choose_gpu(index)
        handle = check(driver.cuDeviceGet(index), f"opening GPU {index}")
        context = check(driver.cuDevicePrimaryCtxRetain(handle), f"creating a context on GPU {summary}")
        try:
            check(driver.cuCtxSetCurrent(context), "making the context current")
            return cls(summary, handle, context)
        except BaseException:
            driver.cuDevicePrimaryCtxRelease(handle)
            raise

    def make_current(self) -> None:
        """Lets the calling thread use this GPU."""
        check(driver.cuCtxSetCurrent(self._context), "making the context current")

    def free_bytes(self) -> int:
        """Device memory that nobody holds now."""
        free, _ = check(driver.cuMemGetInfo(), "asking for free memory")
        return int(free)

    def stream(self, *, priority: int = 0) -> Stream:
        """priority: 0 is the least urgent, −1, −2, … ever more so, as far as the GPU distinguishes."""
        least, greatest = check(driver.cuCtxGetStreamPriorityRange(), "asking for stream priorities")
        level = max(int(greatest), min(int(least), priority))
        flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return Stream(int(check(driver.cuStreamCreateWithPriority(flags, level), "creating a stream")))

    def allocate(self, size: int) -> int:
        """The address of `size` new bytes, aligned to 256 at least. Raises OutOfDeviceMemory."""
        return int(check(driver.cuMemAlloc(max(size, 1)), f"allocating {size} B on GPU {self.index}"))

    def free(self, address: int) -> None:
        """Waits for what uses it."""
        check_freed(driver.cuMemFree(address), "freeing device memory")

    @contextmanager
    def temporary(self, size: int) -> Iterator[int]:
        """Device memory for the length of a with block; its users must be done by the end."""
        address = self.allocate(size)
        try:
            yield address
        finally:
            self.free(address)

    def synchronize(self) -> None:
        """Waits for everything. Raises CudaError if any of it failed."""
        check(driver.cuCtxSynchronize(), "work on the GPU")

    def close(self) -> None:
        """Lets go of the context; streams, events and memory must be gone. Idempotent."""
        if self._context is not None:
            self._context = None
            check_freed(driver.cuDevicePrimaryCtxRelease(self._handle), "closing the context")
