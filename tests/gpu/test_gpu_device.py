"""The engine's device: choice, streams, events, pinned memory, errors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_support import Memory, needs_gpu, opened_device

from engine.cuda.device import (
    CudaError,
    Device,
    Event,
    OutOfDeviceMemory,
    PinnedBuffer,
    choose_gpu,
    visible_gpus,
    why_no_gpu,
)
from engine.cuda.memory import Arena, Layout
from engine.errors import ModelError
from kernels.tensor import DType

pytestmark = needs_gpu
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with opened_device() as device:
        yield device


@pytest.fixture
def memory(device: Device) -> Iterator[Memory]:
    memory = Memory(device)
    yield memory
    memory.release()


def _run(code: str, **environment: str) -> str:
    """A fresh interpreter's standard output."""
    done = subprocess.run(  # noqa: PLW1510
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_gpu_is_named(device: Device) -> None:
    gpu = visible_gpus()[0]
    assert gpu.name == device.name
    assert gpu.name in str(gpu)
    assert why_no_gpu(0) is None
    assert 0 < device.free_bytes() < device.total_bytes


def test_a_gpu_that_is_not_there_is_refused_by_what_is() -> None:
    with pytest.raises(ModelError, match=r"there is no GPU 99; visible are 0: "):
        choose_gpu(99)


def test_looking_for_a_gpu_creates_no_context() -> None:
    code = (
        "from engine.cuda.device import why_no_gpu\n"
        "from cuda.bindings import driver\n"
        "assert why_no_gpu() is None\n"
        "status, context = driver.cuCtxGetCurrent()\n"
        "assert int(status) == 0 and int(context) == 0\n"
        "status, flags, active = driver.cuDevicePrimaryCtxGetState(0)\n"
        "assert not active\n"
    )
    _run(code)


def test_hidden_gpus_are_not_seen() -> None:
    code = "from engine.cuda.device import why_no_gpu; print(why_no_gpu())"
    assert _run(code, CUDA_VISIBLE_DEVICES="") == "there is no NVIDIA GPU that this process can see"


def test_events_order_streams(device: Device, memory: Memory) -> None:
    """A copy on a second stream, made to wait, sees what the first stream wrote after a long queue."""
    size = 64 << 20
    source, target = memory.empty((size,), DType.U8), memory.empty((size,), DType.U8)
    first, second = device.stream(), device.stream(priority=-5)
    written, copied = Event(), Event(timing=False)
    for byte in range(50):
        first.fill(source.address, byte, size)
    first.record(written)
    second.wait(written)
    second.copy_on_device(target.address, source.address, size)
    second.record(copied)
    copied.synchronize()
    assert copied.is_done()
    assert written.is_done()
    assert (memory.download(target) == 49).all()
    for thing in (first, second, written, copied):
        thing.close()
        thing.close()


def test_timing_events(device: Device, memory: Memory) -> None:
    stream = device.stream()
    start, end = Event(timing=True), Event(timing=True)
    block = memory.empty((256 << 20,), DType.U8)
    stream.record(start)
    stream.fill(block.address, 1, block.bytes)
    stream.record(end)
    end.synchronize()
    assert end.milliseconds_since(start) > 0
    for thing in (stream, start, end):
        thing.close()


@pytest.mark.parametrize("write_combined", [False, True])
def test_pinned_memory_travels_both_ways(device: Device, memory: Memory, write_combined: bool) -> None:
    rng = np.random.default_rng(3)
    wanted = rng.integers(-1000, 1000, (37, 11), np.int32)
    up, down = PinnedBuffer(4096, write_combined=write_combined), PinnedBuffer(4096)
    up.array((37, 11), np.int32, offset=128)[:] = wanted
    there = memory.empty((37, 11), DType.I32)
    stream = device.stream()
    stream.copy_to_device(there.address, up.address + 128, there.bytes)
    stream.copy_to_host(down.address, there.address, there.bytes)
    stream.synchronize()
    np.testing.assert_array_equal(down.array((37, 11), np.int32), wanted)
    with pytest.raises(ValueError, match="pinned buffer of 4096 B"):
        up.array((1025,), np.int32)
    for thing in (stream, up, down):
        thing.close()
        thing.close()


def test_other_threads_can_take_part(device: Device) -> None:
    free: list[int] = []

    def look() -> None:
        device.make_current()
        free.append(device.free_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert free[0] > 0


def test_too_much_memory_is_an_error_of_its_own(device: Device) -> None:
    with pytest.raises(OutOfDeviceMemory, match="allocating"):
        device.allocate(device.total_bytes * 2)
    device.synchronize()


def test_a_failure_says_what_failed(device: Device) -> None:
    stream = device.stream()
    with pytest.raises(CudaError, match=r"copying 16 B to the GPU failed: CUDA_ERROR_INVALID_VALUE"):
        stream.copy_to_device(0, 0, 16)
    stream.close()


def test_most_of_the_device_in_one_arena(device: Device) -> None:
    """One allocation of nearly all that is free; given back whole."""
    before = device.free_bytes()
    layout = Layout()
    layout.add("kv_pages", "kv", (before // 10 * 9,), DType.U8)
    layout.add("logits", "logits", (3, 5), DType.F32)
    arena = Arena.allocate(layout, device)
    assert device.free_bytes() < before - layout.bytes + (64 << 20)
    arena.close()
    assert device.free_bytes() >= before - (64 << 20)
