"""What kernel benchmarks share: ceilings, buffers, timing in graphs, the row of a table.

A kernel's limit is the bytes it must move over the measured copy bandwidth, or its FLOPs over the measured
GEMM rate. Each is timed inside a CUDA graph that cycles through copies of its buffers larger than L2, as
layers of a model do; medians of repeated replays.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from cuda.bindings import driver
from kernel_support import Gpu, check, random_bf16

from kernels.launch import Launch
from kernels.tensor import DType, Tensor

WORKING_SET = 256 << 20
"""Bytes that the copies of a kernel's buffers take together: four times an H200's L2."""
REPLAYS = 15


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    kernel: str
    case: str
    microseconds: float
    spread: float
    """(90th − 10th percentile) / median."""
    limit_microseconds: float
    bytes: int
    flops: int

    @property
    def share(self) -> float:
        return self.limit_microseconds / self.microseconds


class Bench:
    """A GPU, its ceilings and the figures so far."""

    def __init__(self) -> None:
        self.gpu = Gpu()
        self.rng = np.random.default_rng(7)
        self.figures: list[Figure] = []
        self.bandwidth = self.copy_bandwidth()
        self.flops = gemm_rate()
        self.noise = self.gpu.upload(random_bf16(self.rng, 16 << 20))

    def copy_bandwidth(self) -> float:
        """Bytes read and written per second by a large device-to-device copy."""
        size = 2 << 30
        source, target = self.gpu.empty((size,), DType.U8), self.gpu.empty((size,), DType.U8)

        def copy() -> None:
            check(driver.cuMemcpyDtoDAsync(target.address, source.address, size, self.gpu.stream))

        seconds = statistics.median(self.timed(copy) for _ in range(8))
        self.gpu.release()
        return 2 * size / seconds

    def timed(self, enqueue: Callable[[], object]) -> float:
        """Seconds between events around what is enqueued."""
        events = [check(driver.cuEventCreate(0)) for _ in range(2)]
        check(driver.cuEventRecord(events[0], self.gpu.stream))
        enqueue()
        check(driver.cuEventRecord(events[1], self.gpu.stream))
        check(driver.cuEventSynchronize(events[1]))
        elapsed = check(driver.cuEventElapsedTime(*events)) / 1e3
        for event in events:
            check(driver.cuEventDestroy(event))
        return float(elapsed)

    def random(self, *shape: int) -> Tensor:
        """bf16 noise, copied on the device."""
        tensor = self.gpu.empty(shape, DType.BF16)
        done = 0
        while done < tensor.bytes:
            part = min(tensor.bytes - done, self.noise.bytes)
            source = self.noise.address
            check(driver.cuMemcpyDtoDAsync(tensor.address + done, source, part, self.gpu.stream))
            done += part
        return tensor

    def random_f32(self, *shape: int) -> Tensor:
        return self.gpu.upload(self.rng.standard_normal(shape, np.float32))

    def measure(
        self, kernel: str, case: str, calls: list[list[Launch]], moved: int, flops: int = 0
    ) -> Figure:
        """calls: the launches of one call, for each copy of the buffers. moved, flops: of one call."""
        stream = self.gpu.stream
        self.gpu.run(*(launch for call in calls for launch in call))
        rounds = max(1, 40 // len(calls))
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        check(driver.cuStreamBeginCapture(stream, mode))
        for _ in range(rounds):
            for call in calls:
                for launch in call:
                    launch(stream)
        graph = check(driver.cuStreamEndCapture(stream))
        executable = check(driver.cuGraphInstantiate(graph, 0))
        check(driver.cuGraphLaunch(executable, stream))
        times = sorted(
            self.timed(lambda: check(driver.cuGraphLaunch(executable, stream))) for _ in range(REPLAYS)
        )
        check(driver.cuGraphExecDestroy(executable))
        check(driver.cuGraphDestroy(graph))
        per_call = 1e6 / (rounds * len(calls))
        median = statistics.median(times) * per_call
        spread = (times[-2] - times[1]) * per_call / median
        limit = max(moved / self.bandwidth, flops / self.flops) * 1e6
        figure = Figure(kernel, case, median, spread, limit, moved, flops)
        self.figures.append(figure)
        print(row_of(figure, self), flush=True)
        return figure

    def copies(self, size: int) -> int:
        return max(1, min(64, -(-WORKING_SET // size)))

    def release(self) -> None:
        """Frees all buffers but the noise."""
        noise = self.noise.address
        self.gpu._allocated.remove(noise)
        self.gpu.release()
        self.gpu._allocated.append(noise)


def gemm_rate() -> float:
    """bf16 FLOP/s of an 8192³ product on random data through torch, in a process of its own; else 0.79e15."""
    code = (
        "import torch; a,b=(torch.randn(8192,8192,device='cuda',dtype=torch.bfloat16) for _ in 'ab')\n"
        "for _ in range(3): a@b\n"
        "e=[torch.cuda.Event(enable_timing=True) for _ in 'ab']; e[0].record()\n"
        "for _ in range(10): a@b\n"
        "e[1].record(); torch.cuda.synchronize(); print(10*2*8192**3/e[0].elapsed_time(e[1])*1e3)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False
    )
    if done.returncode != 0:
        print(f"no torch to measure GEMMs with, taking 790 TFLOP/s: {done.stderr[-200:]}")
        return 0.79e15
    return float(done.stdout)


def row_of(figure: Figure, bench: Bench) -> str:
    rate = (
        f"{figure.flops / figure.microseconds / 1e6:7.0f} TFLOP/s"
        if figure.flops / bench.flops > figure.bytes / bench.bandwidth
        else f"{figure.bytes / figure.microseconds / 1e6:7.2f} TB/s"
    )
    return (
        f"| {figure.kernel} | {figure.case} | {figure.microseconds:.2f} | ±{figure.spread * 50:.0f}% "
        f"| {rate.strip()} | {figure.limit_microseconds:.2f} | {figure.share:.0%} |"
    )
