"""Times the matrix products of real models' layers, and the loading of their weights, on the GPU present.

A product's limit is the bytes it must move over the measured copy bandwidth, or its FLOPs over the measured
rate of an 8192³ product, whichever is longer. Times are medians of graph replays in which each call reads
another copy of the weights, so that they come from device memory. Writes NAME.json and NAME.md into a folder.

    PYTHONPATH=. python scripts/gpu/bench_gemm.py --out benchmarks --name gemm-h200 --checkpoints /tmp
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

_BEGAN = time.perf_counter()

from cuda.bindings import driver  # noqa: E402

from engine.checkpoint import open_checkpoint  # noqa: E402
from engine.cuda.cublaslt import DETERMINISTIC_REDUCTIONS, Product  # noqa: E402
from engine.cuda.device import Device, Event, check, cuda_version_text, driver_version  # noqa: E402
from engine.cuda.gemm import WORKSPACE_BYTES, Epilogue, GemmKey, GemmPlanner  # noqa: E402
from engine.cuda.gemm_tuning import Tuner, scratch_bytes  # noqa: E402
from engine.cuda.memory import Arena, Layout  # noqa: E402
from engine.cuda.weight_loading import load_weights  # noqa: E402
from engine.cuda.weights import reserve_weights  # noqa: E402
from kernels.tensor import DType, Tensor  # noqa: E402
from scripts.gpu.gemm_report import BIGGEST, Figure, Report, table  # noqa: E402
from scripts.gpu.make_random_checkpoint import make_random_checkpoint  # noqa: E402

_IMPORTED = time.perf_counter()
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
FP8_ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
HEAD_ROWS = (1, 8, 64, 256)
LAYERS = {
    "Qwen3-1.7B": {
        "qkv": (4096, 2048), "o": (2048, 2048), "gate_up": (12288, 2048), "down": (2048, 6144),
        "head": (151936, 2048),
    },
    "Qwen3-8B": {
        "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288),
        "head": (151936, 4096),
    },
}  # fmt: skip
_LOADED = "qwen3-1.7b"
_ANY_REDUCTION = 7
_REST = 0.3
"""Seconds before a heavy product is timed, so that all meet the GPU as cool as a short burst would."""
_HEAVY = 5e10
"""FLOPs from which on a product is heavy."""


class Bench:
    def __init__(self, cache_folder: Path) -> None:
        self.report = Report()
        self.cache_folder = cache_folder
        with self.part("device and context"):
            self.device = Device.open(0)
        with self.part("cuBLASLt handle"):
            self.planner = GemmPlanner(self.device, cache_folder=cache_folder)
        self.report.startup_seconds["imports"] = round(_IMPORTED - _BEGAN, 3)
        self.stream = self.device.stream()
        self.report.machine = {
            "gpu": self.device.name,
            "multiprocessors": self.device.limits.multiprocessors,
            "l2_bytes": self.device.limits.l2_bytes,
            "driver_cuda": cuda_version_text(driver_version()),
            "cublaslt": self.planner.library_version,
        }

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.report.startup_seconds[name] = round(time.perf_counter() - began, 3)

    def ceilings(self) -> None:
        size = 4 << 30
        with self.device.temporary(2 * size) as address:
            times = [
                self.timed(lambda: self.stream.copy_on_device(address + size, address, size))
                for _ in range(9)
            ]
        self.bandwidth = 2 * size / statistics.median(times[1:])
        self.flops = {dtype: self.rate(dtype) for dtype in (DType.BF16, DType.E4M3)}
        self.report.ceilings = {
            "copy_bytes_per_second": self.bandwidth,
            "gemm_8192_flops_per_second": self.flops[DType.BF16],
            "fp8_gemm_8192_flops_per_second": self.flops[DType.E4M3],
        }
        rates = ", ".join(f"{dtype.value} {rate / 1e12:.0f}" for dtype, rate in self.flops.items())
        print(f"copy {self.bandwidth / 1e12:.2f} TB/s, {BIGGEST}³ TFLOP/s: {rates}", flush=True)

    def rate(self, dtype: DType) -> float:
        """FLOP/s of the largest product of operands of that type."""
        key = GemmKey(BIGGEST, BIGGEST, BIGGEST, x=dtype, w=dtype)
        with self.tuner(key) as tuner:
            best = tuner.tune(key).algorithm
            time.sleep(_REST)
            (microseconds,) = tuner.time(key, best)
        return key.flops / (microseconds * 1e-6)

    def timed(self, enqueue: Callable[[], object]) -> float:
        """Seconds between events around what is enqueued."""
        start, end = Event(timing=True), Event(timing=True)
        self.stream.record(start)
        enqueue()
        self.stream.record(end)
        end.synchronize()
        seconds = end.milliseconds_since(start) / 1e3
        start.close()
        end.close()
        return seconds

    @contextmanager
    def tuner(self, *keys: GemmKey) -> Iterator[Tuner]:
        size = max(scratch_bytes(key, self.device.limits.l2_bytes, WORKSPACE_BYTES) for key in keys)
        with self.device.temporary(size) as address:
            scratch = Tensor(address, (size,), DType.U8)
            tuner = Tuner(self.device, self.planner.library, scratch, WORKSPACE_BYTES)
            try:
                yield tuner
            finally:
                tuner.close()

    # --- products ------------------------------------------------------------------------------------

    def products(self) -> None:
        cases = [
            (model, layer, GemmKey(rows, n, k, y=DType.F32 if layer == "head" else DType.BF16))
            for model, layers in LAYERS.items()
            for layer, (n, k) in layers.items()
            for rows in (HEAD_ROWS if layer == "head" else ROWS)
        ]
        cases += [
            (model, f"{layer}, e4m3", GemmKey(rows, n, k, x=DType.E4M3, w=DType.E4M3))
            for model, layers in LAYERS.items()
            for layer, (n, k) in layers.items()
            for rows in FP8_ROWS
            if layer != "head"
        ]
        keys = [key for _, _, key in cases]
        with self.part(f"tuning {len(keys)} products"):
            self.planner.plan_all(keys)
        with self.tuner(*keys) as tuner:
            for model, layer, key in sorted(cases, key=lambda case: case[2].flops):
                self.product(tuner, model, layer, key)
        order = {str(key): place for place, key in enumerate(keys)}
        self.report.products.sort(key=lambda figure: order[figure.key])
        with self.part(f"{len(keys)} cached products found"):
            again = GemmPlanner(self.device, cache_folder=self.cache_folder)
            tuned = again.plan_all(keys)
            for key in keys:
                again.plan(key)
            again.close()
        if tuned:
            raise SystemExit(f"{tuned} products were not found in the cache")

    def product(self, tuner: Tuner, model: str, layer: str, key: GemmKey) -> None:
        product = Product(key)
        first = self.planner.library.candidates(product, 1, WORKSPACE_BYTES)[0]
        product.close()
        algorithm = self.planner.plan(key).algorithm
        time.sleep(_REST if key.flops > _HEAVY else 0)
        heuristic, tuned = tuner.time(key, first, algorithm)
        if algorithm == first:
            heuristic = tuned
        limit = max(key.bytes / self.bandwidth, key.flops / self.flops[key.x]) * 1e6
        figure = Figure(
            model, layer, str(key), key.rows, key.n, key.k, round(tuned, 2), round(heuristic, 2),
            round(key.bytes / tuned / 1e3, 1), round(key.flops / tuned / 1e6, 2), round(limit, 2),
            algorithm.config(),
        )  # fmt: skip
        self.report.products.append(figure)

    def epilogues(self) -> None:
        """What adding to the residual, or a bias, costs above the plain product."""
        for model, layer in (
            ("Qwen3-1.7B", "o"),
            ("Qwen3-8B", "o"),
            ("Qwen3-8B", "down"),
            ("Qwen3-8B", "qkv"),
        ):
            n, k = LAYERS[model][layer]
            for rows in (1, 8, 64, 2048):
                base = GemmKey(rows, n, k)
                variants = {
                    "bf16": base,
                    "bf16 + bias": GemmKey(rows, n, k, epilogue=Epilogue.BIAS),
                    "bf16 + c": GemmKey(rows, n, k, epilogue=Epilogue.ADD),
                    "f32": GemmKey(rows, n, k, y=DType.F32),
                    "f32 + c": GemmKey(rows, n, k, y=DType.F32, epilogue=Epilogue.ADD),
                }
                with self.tuner(*variants.values()) as tuner:
                    times = {name: round(tuner.tune(key).microseconds, 2) for name, key in variants.items()}
                self.report.epilogues.append({"model": model, "layer": layer, "rows": rows, "us": times})

    def reductions(self) -> None:
        """What allowing only float32 split-K sums in a fixed order costs."""
        for n, k in ((2048, 2048), (4096, 2048), (2048, 6144), (4096, 4096), (4096, 12288)):
            for rows in (1, 16, 64, 256):
                key = GemmKey(rows, n, k)
                with self.tuner(key) as tuner:
                    times = {
                        name: round(tuner.tune(key, reductions=mask).microseconds, 2)
                        for name, mask in (("fixed order", DETERMINISTIC_REDUCTIONS), ("any", _ANY_REDUCTION))
                    }
                self.report.reductions.append({"n": n, "k": k, "rows": rows, "us": times})

    def host_cost(self) -> None:
        """Of a call from Python, eager and captured, and of a graph's launch."""
        key = GemmKey(1, 2048, 2048)
        sizes = (WORKSPACE_BYTES, key.k * 2, key.n * 2, key.weight_bytes)
        with self.device.temporary(sum(sizes) + 4096) as address:
            workspace = Tensor(address, (WORKSPACE_BYTES,), DType.U8)
            x = Tensor(address + sizes[0], (1, key.k), DType.BF16)
            y = Tensor(x.address + sizes[1], (1, key.n), DType.BF16)
            w = Tensor(y.address + sizes[2], (key.n, key.k), DType.BF16)
            gemm = self.planner.plan(key).bind(x=x, w=w, y=y, workspace=workspace)
            gemm(self.stream.handle)
            self.report.host_microseconds["eager call"] = self._per_call(gemm)
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            check(driver.cuStreamBeginCapture(self.stream.handle, mode), "capture")
            self.report.host_microseconds["captured call"] = self._per_call(gemm, synchronize=False)
            graph = check(driver.cuStreamEndCapture(self.stream.handle), "capture")
            executable = check(driver.cuGraphInstantiate(graph, 0), "instantiate")

            def launch(stream: int) -> None:
                check(driver.cuGraphLaunch(executable, stream), "launch")

            launch(self.stream.handle)
            self.stream.synchronize()
            self.report.host_microseconds["launch of a graph of 400 calls"] = self._per_call(launch, calls=2)
            check(driver.cuGraphExecDestroy(executable), "destroy")
            check(driver.cuGraphDestroy(graph), "destroy")

    def _per_call(self, call: Callable[[int], None], *, calls: int = 100, synchronize: bool = True) -> float:
        times = []
        for _ in range(4):
            began = time.perf_counter()
            for _ in range(calls):
                call(self.stream.handle)
            times.append((time.perf_counter() - began) / calls * 1e6)
            if synchronize:
                self.stream.synchronize()
        return round(statistics.median(times), 2)

    # --- weights -------------------------------------------------------------------------------------

    def loading(self, folder: Path) -> None:
        """From a checkpoint that has just been written, so that all of it is in memory."""
        began = time.perf_counter()
        make_random_checkpoint(folder, _LOADED)
        written = time.perf_counter() - began
        try:
            for threads in (8, 1, 2, 4, 8, 16):
                self.load(folder, threads)
        finally:
            shutil.rmtree(folder)
        self.report.loading.pop(0)
        self.report.startup_seconds[f"(writing the {_LOADED} checkpoint)"] = round(written, 3)

    def load(self, folder: Path, threads: int) -> None:
        began = time.perf_counter()
        with open_checkpoint(folder) as checkpoint:
            opened = time.perf_counter()
            layout = Layout()
            reserve_weights(checkpoint.config, layout)
            arena = Arena.allocate(layout, self.device)
            allocated = time.perf_counter()
            report = load_weights(checkpoint, arena, self.device, threads=threads)
            arena.close()
        self.report.loading.append({
            "model": _LOADED, "bytes": report.bytes, "threads": threads,
            "open_seconds": round(opened - began, 3), "allocate_seconds": round(allocated - opened, 3),
            "seconds": round(report.seconds, 3),
            "gigabytes_per_second": round(report.bytes_per_second / 1e9, 2),
        })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="gemm")
    parser.add_argument("--checkpoints", type=Path, default=Path("/tmp"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        bench = Bench(Path(cache))
        parts = (
            bench.ceilings,
            bench.host_cost,
            bench.products,
            lambda: bench.loading(arguments.checkpoints / "slipstream-bench"),
            bench.reductions,
            bench.epilogues,
        )
        for part in parts:
            part()
            write(bench.report, arguments.out, arguments.name)
    print(table(bench.report))


def write(report: Report, folder: Path, name: str) -> None:
    """What is known so far, as JSON and as a table."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(asdict(report), indent=1))
    (folder / f"{name}.md").write_text(table(report))


if __name__ == "__main__":
    main()
