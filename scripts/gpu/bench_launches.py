"""The host's cost of a launch: kernels.launch beside cuda.bindings and cuda.core."""

from __future__ import annotations

import ctypes
import dataclasses
import statistics
import time
from collections.abc import Callable

import numpy as np
from cuda.bindings import driver
from kernel_bench import Bench

from kernels import activation
from kernels.compiler import compile_unit, default_cache_folder
from kernels.device import query_limits
from kernels.launch import Dim3, Launch


def launch_costs(bench: Bench) -> dict[str, float]:
    """Host microseconds per launch of one small kernel, by way of launching."""
    gate_up, out = bench.random(1, 64), bench.random(1, 32)
    ways = launch_ways(
        activation.gated_activation(bench.gpu.library, gate_up=gate_up, out=out), bench.gpu.stream
    )
    result = {}
    for name, way in ways.items():
        times = []
        for _ in range(7):
            bench.gpu.synchronize()
            started = time.perf_counter()
            for _ in range(200):
                way()
            times.append((time.perf_counter() - started) / 200 * 1e6)
        bench.gpu.synchronize()
        result[name] = statistics.median(times)
        print(f"  {name}: {result[name]:.2f} µs", flush=True)
    return result


def launch_ways(launch: Launch, stream: int) -> dict[str, Callable[[], object]]:
    """The same launch by kernels.launch, by cuda.bindings and by cuda.core."""
    plain_kernel = dataclasses.replace(launch.kernel, dependent_launch=False)
    arguments = [type(value)(value.value) for value in launch._values]
    plain = Launch(plain_kernel, Dim3(1), Dim3(32), arguments)
    function, params = launch.kernel.function, plain._pointers_address
    ways: dict[str, Callable[[], object]] = {
        "Launch, dependent": lambda: launch(stream),
        "Launch, plain": lambda: plain(stream),
        "cuda.bindings cuLaunchKernel, packed": lambda: driver.cuLaunchKernel(
            function, 1, 1, 1, 32, 1, 1, 0, stream, params, 0
        ),
    }
    core = cuda_core_way(arguments, stream)
    if core is not None:
        ways["cuda.core launch"] = core
    return ways


def cuda_core_way(arguments: list[ctypes._SimpleCData[int]], stream: int) -> Callable[[], object] | None:
    """cuda.core's launch of the same cubin, or None where this cuda.core cannot."""
    compiled = compile_unit(activation.UNITS[0], query_limits(0).arch, default_cache_folder())
    try:
        from cuda.core import Device, LaunchConfig, ObjectCode, Stream
        from cuda.core import launch as core_launch

        Device(0).set_current()
        code = ObjectCode.from_cubin(compiled.cubin)
        kernel = code.get_kernel(compiled.lowered_names["gated_activation<false, false>"])
        handle = Stream.from_handle(stream)
        config = LaunchConfig(grid=1, block=32)
        *pointers, inter = arguments
        values = (*(np.uint64(pointer.value) for pointer in pointers), np.int32(inter.value))
        core_launch(handle, config, kernel, *values)
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        print(f"  cuda.core: {type(error).__name__}: {error}")
        return None
    return lambda: core_launch(handle, config, kernel, *values)
