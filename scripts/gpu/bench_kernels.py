"""Times every kernel family on the GPU present against its limit, and launches against each other.

A kernel's limit is the bytes it must move over the measured copy bandwidth, or its FLOPs over the measured
GEMM rate. Each is timed inside a CUDA graph that cycles through copies of its buffers larger than L2, as
layers of a model do; medians of repeated replays. Writes NAME.json and NAME.md into the folder given.

    PYTHONPATH=.:tests/gpu python scripts/gpu/bench_kernels.py --out benchmarks --name kernels-h200
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from cuda.bindings import driver
from kernel_support import Gpu, check, random_bf16

from kernels import activation, attention_decode, attention_prefill, embedding, norm, rope, sampling, slots
from kernels.compiler import nvrtc_version
from kernels.launch import Dim3, Launch, i32
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
            check(driver.cuMemcpyDtoD(tensor.address + done, self.noise.address, part))
            done += part
        return tensor

    def random_f32(self, *shape: int) -> Tensor:
        return self.gpu.upload(self.rng.standard_normal(shape, np.float32))

    def measure(self, kernel: str, case: str, calls: list[list[Launch]], moved: int, flops: int = 0) -> Figure:
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
        times = sorted(self.timed(lambda: check(driver.cuGraphLaunch(executable, stream))) for _ in range(REPLAYS))
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

    # --- families ------------------------------------------------------------------------------------

    def norms(self) -> None:
        for rows, hidden in ((1, 2048), (64, 2048), (2048, 2048), (64, 4096), (2048, 4096)):
            moved = rows * hidden * (4 + 4 + 2 + 2)
            weight = self.random(hidden)
            calls = [
                [norm.add_rms_norm(
                    self.gpu.library, residual=self.random_f32(rows, hidden), delta=self.random(rows, hidden),
                    weight=weight, out=self.random(rows, hidden), epsilon=1e-6)]
                for _ in range(self.copies(moved))
            ]  # fmt: skip
            self.measure("add_rms_norm", f"{rows}×{hidden}", calls, moved)
            self.gpu_release()

    def activations(self) -> None:
        for rows, inter in ((1, 6144), (64, 6144), (2048, 6144), (2048, 12288)):
            moved = rows * inter * 6
            calls = [
                [activation.gated_activation(
                    self.gpu.library, gate_up=self.random(rows, 2 * inter), out=self.random(rows, inter))]
                for _ in range(self.copies(moved))
            ]  # fmt: skip
            self.measure("swiglu", f"{rows}×{inter}", calls, moved)
            self.gpu_release()

    def embeddings(self) -> None:
        for rows in (1, 64, 2048):
            table, out = self.random(151936, 2048), self.gpu.empty((rows, 2048), DType.F32)
            calls = [
                [embedding.embed(self.gpu.library, table=table, out=out, tokens=self.gpu.upload(
                    self.rng.integers(0, 151936, rows).astype(np.int32)))]
                for _ in range(16)
            ]  # fmt: skip
            self.measure("embed", f"{rows}×2048", calls, rows * 2048 * 6)
            self.gpu_release()

    def ropes(self) -> None:
        for rows, n_heads in ((1, 16), (64, 16), (2048, 16), (2048, 32)):
            n_kv, dim, width = 8, 128, 64
            moved = rows * (n_heads + 2 * n_kv) * dim * 4
            table = self.gpu.upload(np.arange(width, dtype=np.int32)[None])
            position = self.gpu.upload(np.arange(rows, dtype=np.int32) % (width * 64))
            angles, row_slot = self.random_f32(width * 64, 64), self.gpu.empty((rows,), DType.I32, fill=0)
            weight = self.random(dim)
            calls = [
                [rope.rope_and_write(
                    self.gpu.library, qkv=self.random(rows, (n_heads + 2 * n_kv) * dim), cosines=angles, sines=angles,
                    row_slot=row_slot, row_position=position, block_table=table,
                    q_out=self.random(rows, n_heads, dim), k_pages=self.random(width, n_kv, 64, dim),
                    v_pages=self.random(width, n_kv, 64, dim), q_norm=weight, k_norm=weight)]
                for _ in range(min(16, self.copies(moved)))
            ]  # fmt: skip
            self.measure("rope_and_write", f"{rows} rows, {n_heads}/{n_kv} heads", calls, moved)
            self.gpu_release()

    def decode(self, rows: int, context: int, n_heads: int, n_kv: int, dim: int, **options: int) -> None:
        pages_each = -(-context // 64)
        moved = rows * context * n_kv * dim * 4 + rows * n_heads * dim * 4
        layers = max(2, min(28, -(-WORKING_SET // moved)))
        pages = rows * pages_each
        table = self.gpu.upload(self.rng.permutation(pages).astype(np.int32).reshape(rows, pages_each))
        position = self.gpu.upload(np.full(rows, context - 1, np.int32))
        active, row_slot = self.gpu.upload(np.ones(rows, np.int32)), self.gpu.upload(np.arange(rows, dtype=np.int32))
        splits = options.get("splits") or attention_decode.max_splits(self.gpu.limits, n_kv)
        min_pages = options.get("min_pages", attention_decode.MIN_SPLIT_PAGES)
        shape = attention_decode.DecodeShape(rows, n_heads, n_kv, dim, splits)
        workspace = self.gpu.buffers(attention_decode.DecodeWorkspace, shape.workspace(), fill=0)
        work = self.gpu.buffers(attention_decode.DecodePlan, shape.plan(), fill=0)
        self.gpu.run(attention_decode.plan_decode(
            self.gpu.library, row_slot=row_slot, slot_position=position, slot_active=active, plan=work,
            splits=splits, min_pages=min_pages))  # fmt: skip
        out = self.random(rows, n_heads, dim)
        calls = [
            attention_decode.attention_decode(
                self.gpu.library, self.gpu.limits, query=self.random(rows, n_heads, dim),
                k_pages=self.random(pages, n_kv, 64, dim), v_pages=self.random(pages, n_kv, 64, dim),
                block_table=table, plan=work, workspace=workspace, out=out, splits=splits, scale=dim**-0.5)
            for _ in range(layers)
        ]  # fmt: skip
        extra = "".join(f", {k} {v}" for k, v in options.items())
        self.measure("attention_decode", f"{rows}×{context}, {n_heads}/{n_kv} heads of {dim}{extra}", calls, moved)
        self.gpu_release()

    def decodes(self) -> None:
        for rows, context in ((1, 256), (1, 384), (1, 2048), (1, 8192), (8, 384), (64, 256), (64, 384), (64, 2048), (64, 8192)):
            self.decode(rows, context, 16, 8, 128)
        for rows, context in ((1, 384), (8, 384), (64, 384), (32, 4096)):
            self.decode(rows, context, 32, 8, 128)
        self.decode(64, 2048, 32, 8, 64)
        self.decode(64, 2048, 16, 8, 256)
        for min_pages in (1, 2, 8):
            for rows, context in ((1, 384), (64, 384), (64, 8192)):
                self.decode(rows, context, 16, 8, 128, min_pages=min_pages)
        for splits in (8, 16, 64):
            for rows, context in ((1, 8192), (32, 4096)):
                self.decode(rows, context, 32, 8, 128, splits=splits)

    def prefill(self, lengths: list[int], n_heads: int, n_kv: int, dim: int) -> None:
        rows, group = sum(lengths), n_heads // n_kv
        variant = attention_prefill.pick_variant(self.gpu.limits, dim)
        tiles = attention_prefill.tile_list(range(len(lengths)), lengths, [0] * len(lengths), group, variant)
        each = -(-max(lengths) // 64)
        pages = each * len(lengths)
        table = self.rng.permutation(pages).astype(np.int32).reshape(len(lengths), each)
        launch = attention_prefill.attention_prefill(
            self.gpu.library, self.gpu.limits, query=self.random(rows, n_heads, dim),
            k_pages=self.random(pages, n_kv, 64, dim), v_pages=self.random(pages, n_kv, 64, dim),
            block_table=self.gpu.upload(table), tiles=self.gpu.upload(tiles),
            n_tiles=self.gpu.upload(np.array([len(tiles)], np.int32)), out=self.random(rows, n_heads, dim),
            scale=dim**-0.5,
        )  # fmt: skip
        flops = sum(4 * n_heads * dim * n * (n + 1) // 2 for n in lengths)
        case = f"{len(lengths)}×{lengths[0]}, {n_heads}/{n_kv} heads of {dim}"
        self.measure("attention_prefill", case, [[launch]], 4 * rows * n_heads * dim, flops)
        self.gpu_release()

    def prefills(self) -> None:
        self.prefill([2048], 16, 8, 128)
        self.prefill([2048] * 8, 16, 8, 128)
        self.prefill([2048] * 8, 32, 8, 128)
        self.prefill([4096], 32, 8, 128)
        self.prefill([16384], 32, 8, 128)
        self.prefill([4096], 32, 8, 64)
        self.prefill([4096], 16, 4, 256)

    def samplings(self) -> None:
        vocab = 151936
        kinds = {
            "greedy": {"temperature": 0.0},
            "temperature": {},
            "top-p 0.95, top-k 50": {"top_p": 0.95, "top_k": 50},
            "top-p 0.95": {"top_p": 0.95},
            "penalties, top-p 0.9": {"top_p": 0.9, "presence_penalty": 0.5},
        }
        for rows in (1, 8, 64):
            for kind, settings in kinds.items():
                self.sampling(rows, vocab, kind, settings)

    def sampling(self, rows: int, vocab: int, kind: str, settings: dict[str, float]) -> None:
        gpu = self.gpu
        shape = slots.SlotShape(rows, vocab, max_bias=16)
        state = slots.SlotBuffers(shape, **{n: gpu.empty(s, t, fill=0) for n, (s, t) in shape.buffers().items()})
        staged = slots.stage_starts([slots.SlotSetup(slot=s, seed=s, **settings) for s in range(rows)], shape)  # type: ignore[arg-type]
        raw = gpu.upload(staged.starts.view(np.uint8).reshape(rows, -1))
        nothing = gpu.upload(np.zeros(1, np.int32))
        gpu.run(slots.start_slots(
            gpu.library, starts=raw, count=rows, tokens=nothing, bias_ids=nothing,
            bias_values=gpu.upload(np.zeros(1, np.float32)), slots=state))  # fmt: skip
        scratch = gpu.buffers(sampling.SampleScratch, sampling.SampleShape(rows, vocab, vocab).scratch())
        row_slot = gpu.upload(np.arange(rows, dtype=np.int32))
        results = gpu.empty((rows,), DType.I32), gpu.empty((rows,), DType.I32)
        logits = self.rng.standard_normal((rows, vocab), np.float32) * 2.5  # peaks near 11, as a model's do
        calls = [
            sampling.sample(
                gpu.library, logits=gpu.upload(np.roll(logits, i, axis=1)), row_slot=row_slot, slots=state,
                scratch=scratch, tokens=results[0], statuses=results[1], first_token=True,
                all_greedy=kind == "greedy")
            for i in range(min(8, self.copies(rows * vocab * 4)))
        ]  # fmt: skip
        self.measure("sample", f"{rows}×{vocab}, {kind}", calls, rows * vocab * 4)
        self.gpu_release()

    def gpu_release(self) -> None:
        noise = self.noise.address
        self.gpu._allocated.remove(noise)
        self.gpu.release()
        self.gpu._allocated.append(noise)

    # --- launches ------------------------------------------------------------------------------------

    def launches(self) -> dict[str, float]:
        """Host microseconds per launch of one small kernel, by way of launching."""
        gate_up, out = self.random(1, 64), self.random(1, 32)
        launch = activation.gated_activation(self.gpu.library, gate_up=gate_up, out=out)
        stream, kernel = self.gpu.stream, launch.kernel
        values = (gate_up.address, out.address, i32(32))
        types = (None, None, None)
        del types
        import ctypes

        packed = [ctypes.c_uint64(values[0]), ctypes.c_uint64(values[1]), ctypes.c_int32(32)]
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(v) for v in packed))
        params = ctypes.addressof(pointers)

        def by_bindings() -> None:
            driver.cuLaunchKernel(kernel.function, 1, 1, 1, 32, 1, 1, 0, stream, params, 0)

        ways: dict[str, Callable[[], object]] = {
            "Launch, prepared, dependent": lambda: launch(stream),
            "Launch, prepared, plain": _plain(launch, stream),
            "cuda.bindings cuLaunchKernel, prepared": by_bindings,
        }
        core = _cuda_core_way(kernel.function, values, stream)
        if core is not None:
            ways["cuda.core launch"] = core
        result = {}
        for name, way in ways.items():
            best = []
            for _ in range(7):
                self.gpu.synchronize()
                started = time.perf_counter()
                for _ in range(200):
                    way()
                best.append((time.perf_counter() - started) / 200 * 1e6)
            self.gpu.synchronize()
            result[name] = statistics.median(best)
            print(f"  {name}: {result[name]:.2f} µs", flush=True)
        return result


def _plain(launch: Launch, stream: int) -> Callable[[], object]:
    import dataclasses

    kernel = dataclasses.replace(launch.kernel, dependent_launch=False)
    config = launch._config
    plain = Launch(kernel, Dim3(*config.grid), Dim3(*config.block), ())
    plain._values, plain._pointers, plain._pointers_address = launch._values, launch._pointers, launch._pointers_address
    return lambda: plain(stream)


def _cuda_core_way(function: int, values: tuple[object, ...], stream: int) -> Callable[[], object] | None:
    """cuda.core's launch of a kernel built the same way, or None where this cuda.core cannot."""
    try:
        from cuda.core import Device, LaunchConfig, ObjectCode, Stream
        from cuda.core import launch as core_launch
    except ImportError:
        try:
            from cuda.core.experimental import Device, LaunchConfig, ObjectCode, Stream
            from cuda.core.experimental import launch as core_launch
        except ImportError as error:
            print(f"  cuda.core: {error}")
            return None
    from kernels.compiler import compile_unit, default_cache_folder
    from kernels.device import query_limits

    try:
        Device(0).set_current()
        compiled = compile_unit(activation.UNITS[0], query_limits(0).arch, default_cache_folder())
        code = ObjectCode.from_cubin(compiled.cubin)
        kernel = code.get_kernel(compiled.lowered_names["gated_activation<false>"])
        handle = Stream.from_handle(stream)
        config = LaunchConfig(grid=1, block=32)
        arguments = (np.uint64(values[0]), np.uint64(values[1]), np.int32(32))  # type: ignore[call-overload]
        core_launch(handle, config, kernel, *arguments)
    except Exception as error:  # noqa: BLE001 - a version that cannot is a result, too
        print(f"  cuda.core: {type(error).__name__}: {error}")
        return None
    return lambda: core_launch(handle, config, kernel, *arguments)


def gemm_rate() -> float:
    """bf16 FLOP/s of an 8192³ product on random data through torch, in a process of its own; else 0.79e15."""
    code = (
        "import torch; a,b=(torch.randn(8192,8192,device='cuda',dtype=torch.bfloat16) for _ in 'ab')\n"
        "for _ in range(3): a@b\n"
        "e=[torch.cuda.Event(enable_timing=True) for _ in 'ab']; e[0].record()\n"
        "for _ in range(10): a@b\n"
        "e[1].record(); torch.cuda.synchronize(); print(10*2*8192**3/e[0].elapsed_time(e[1])*1e3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
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
        f"| {figure.kernel} | {figure.case} | {figure.microseconds:.2f} | ±{figure.spread * 50:.0f}% | {rate.strip()} "
        f"| {figure.limit_microseconds:.2f} | {figure.share:.0%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    parser.add_argument("--name", default="kernels-h200")
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    bench = Bench()
    parts: dict[str, Callable[[], object]] = {
        "launches": bench.launches, "norms": bench.norms, "activations": bench.activations,
        "embeddings": bench.embeddings, "ropes": bench.ropes, "decodes": bench.decodes, "prefills": bench.prefills,
        "samplings": bench.samplings,
    }  # fmt: skip
    launches: object = {}
    print(f"copy {bench.bandwidth / 1e12:.2f} TB/s, bf16 GEMM {bench.flops / 1e12:.0f} TFLOP/s", flush=True)
    for name, part in parts.items():
        if options.only and name not in options.only:
            continue
        result = part()
        launches = result if name == "launches" else launches
    write(options, bench, launches)


def write(options: argparse.Namespace, bench: Bench, launches: object) -> None:
    name = check(driver.cuDeviceGetName(80, 0)).decode().rstrip("\0")
    environment = {
        "device": name,
        "driver": check(driver.cuDriverGetVersion()),
        "nvrtc": ".".join(map(str, nvrtc_version())),
        "copy_bytes_per_second": bench.bandwidth,
        "gemm_flops_per_second": bench.flops,
        "launch_microseconds": launches,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    figures = [asdict(figure) for figure in bench.figures]
    path = options.out / f"{options.name}.json"
    path.write_text(json.dumps({"environment": environment, "figures": figures}, indent=1, ensure_ascii=False))
    lines = [
        f"# Kernels on one {name}",
        "",
        f"Copy {bench.bandwidth / 1e12:.2f} TB/s, bf16 GEMM {bench.flops / 1e12:.0f} TFLOP/s, both measured in the same "
        f"run; NVRTC {environment['nvrtc']}. Each kernel inside a CUDA graph over buffers larger than L2, median of "
        f"{REPLAYS} replays; made by `scripts/gpu/bench_kernels.py`.",
        "",
        "| kernel | case | µs | spread | rate | limit µs | of limit |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        *(row_of(figure, bench) for figure in bench.figures),
        "",
        "Host microseconds per launch: " + "; ".join(f"{k} {v:.2f}" for k, v in dict(launches or {}).items()) + ".",  # type: ignore[call-overload]
    ]
    (options.out / f"{options.name}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
