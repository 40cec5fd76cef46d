"""Measures the CUDA engine in-process, beside the ceilings of the same card, on random checkpoints.

    PYTHONPATH=. python scripts/gpu/bench_engine.py --out benchmarks --name engine-h200 \
        [--models qwen3-1.7b qwen3-8b] [--parts decode prefill profile startup]

KV pages are filled with noise, never zeros. Decode runs two steps ahead of its results, as serving does.
A failure in one part does not stop the others. Writes NAME.json and NAME.md into the folder given.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.cuda.engine import CudaEngine
from engine.cuda.gemm import GemmKey, GemmPlanner
from engine.cuda.loading import load_cuda_engine
from engine.cuda.settings import CudaSettings
from engine.interface import (
    PAGE_SIZE,
    PageAssignment,
    PrefillChunk,
    Sampling,
    SlotStart,
    StepHandle,
    StepPlan,
    pages_for,
)
from engine.options import EngineOptions
from kernels.tensor import DType
from scripts.benchmark.figures import Figure, table
from scripts.gpu.engine_profile import profile_decode, profile_prefill
from scripts.gpu.make_random_checkpoint import MODELS, make_random_checkpoint

GREEDY = Sampling(temperature=0.0)
DRAWN = Sampling(temperature=1.0, top_p=0.95, top_k=50, seed=5)
WIDTHS = (1, 8, 64)
CHUNK = 2048
LONGEST = 8192 + 512
MUST: dict[tuple[str, str], float] = {
    ("qwen3-1.7b", "decode ×1"): 800, ("qwen3-8b", "decode ×1"): 215,
    ("qwen3-1.7b", "decode ×8"): 5_500, ("qwen3-8b", "decode ×8"): 1_600,
    ("qwen3-1.7b", "decode ×64"): 25_000, ("qwen3-8b", "decode ×64"): 10_500,
    ("qwen3-1.7b", "prefill 8 × 2,048"): 170_000, ("qwen3-8b", "prefill 8 × 2,048"): 40_000,
    ("qwen3-1.7b", "first token of 2,048"): 14, ("qwen3-8b", "first token of 2,048"): 48,
    ("qwen3-8b", "start to ready"): 10,
}  # fmt: skip


class Streams:
    """Sequences that decode side by side, on an engine whose pages this owns."""

    def __init__(self, engine: CudaEngine, count: int, context: int, length: int, sampling: Sampling) -> None:
        """Starts `count` sequences at `context` tokens, of which all but the last are as if cached."""
        self._engine = engine
        self._slots = tuple(range(count))
        self._position = context
        self._pages_each = pages_for(length)
        self._under_way: deque[StepHandle] = deque()
        self.tokens = 0
        self.idle_us: list[float] = []
        self.step_us: list[float] = []
        random = np.random.default_rng(context)
        vocab = engine.info.vocab_size
        last = random.integers(3, vocab, (count, 1)).astype(np.int32)
        none = np.zeros(0, np.int32)
        starts = tuple(SlotStart(slot, sampling, none, none) for slot in self._slots)
        pages = tuple(self._page(slot, index) for slot in self._slots for index in range(pages_for(context)))
        chunks = tuple(PrefillChunk(slot, last[slot], context - 1, True) for slot in self._slots)
        for first in range(0, count, 16):
            part = slice(first, first + 16)
            chosen = self._slots[part]
            plan = StepPlan(
                0,
                starts=starts[part],
                pages=tuple(page for page in pages if page.slot in chosen),
                prefills=chunks[part],
            )
            engine.execute(plan).result()

    def _page(self, slot: int, index: int) -> PageAssignment:
        return PageAssignment(slot, index, slot * self._pages_each + index)

    def decode(self, steps: int) -> float:
        """Seconds from the first step's enqueueing to the last one's tokens."""
        began = time.perf_counter()
        for _ in range(steps):
            pages: tuple[PageAssignment, ...] = ()
            if self._position % PAGE_SIZE == 0:
                index = self._position // PAGE_SIZE
                pages = tuple(self._page(slot, index) for slot in self._slots)
            self._under_way.append(self._engine.execute(StepPlan(1, pages=pages, decodes=self._slots)))
            self._position += 1
            if len(self._under_way) == 2:
                self._collect()
        while self._under_way:
            self._collect()
        return time.perf_counter() - began

    def _collect(self) -> None:
        result = self._under_way.popleft().result()
        self.tokens += len(result.tokens)
        self.step_us.append(result.stage_us["step"])
        self.idle_us.append(result.stage_us["idle"])


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._out, self._name, self._parts = arguments.out, arguments.name, arguments.parts
        self.models: list[str] = arguments.models
        self.step_tokens: int = arguments.step_tokens
        self.skinny: bool = not arguments.no_skinny
        self.residual = DType(arguments.residual)
        self.figures: list[Figure] = []
        self.details: dict[str, Any] = {}
        self.failures: dict[str, str] = {}

    def part(self, name: str, run: Callable[[], None]) -> None:
        """Runs one part, if it was asked for, and writes what there is so far."""
        if name.split("/")[-1] not in self._parts:
            return
        began = time.perf_counter()
        try:
            run()
        except Exception:  # noqa: BLE001 - the other parts are to run all the same
            self.failures[name] = traceback.format_exc()
            print(self.failures[name], flush=True)
        print(f"{time.perf_counter() - began:6.1f} s  {name}", flush=True)
        self.write()

    def add(self, name: str, unit: str, runs: Sequence[float], *, model: str = "", note: str = "") -> None:
        must = MUST.get((model, name))
        bounds = {"at_most": must} if unit in ("ms", "s") else {"at_least": must}
        figure = Figure(f"{model} {name}".strip(), unit, tuple(runs), note=note, **bounds)
        self.figures.append(figure)
        print(f"    {figure.name}: {figure.median:,.5g} {unit}  {note}", flush=True)

    def write(self) -> None:
        self._out.mkdir(parents=True, exist_ok=True)
        document = {
            "figures": [figure.as_json() for figure in self.figures],
            "details": self.details,
            "failures": self.failures,
        }
        (self._out / f"{self._name}.json").write_text(json.dumps(document, indent=1, ensure_ascii=False))
        where = self.details.get("machine", {})
        heading = ", ".join(f"{key} {value}" for key, value in where.items())
        (self._out / f"{self._name}.md").write_text(f"{heading}\n\n{table(self.figures)}")


def measure(bench: Bench, model: str, folder: Path) -> None:
    sizes = tuple(sorted({16, CHUNK, bench.step_tokens}))
    arm = {"skinny": bench.skinny, "residual": bench.residual}
    engine = load(folder, CudaSettings(decode_widths=WIDTHS, prefill_sizes=sizes, **arm), bench.step_tokens)
    try:
        bench.details.setdefault("machine", {"card": engine.info.device} | engine.info.versions)
        bench.details[f"{model} first start, s"] = engine.startup
        bench.details[f"{model} memory"] = engine.info.memory_plan
        print(model, {key: round(value, 2) for key, value in engine.startup.items()}, flush=True)
        fill_pages(engine)
        bench.part(f"{model}/ceilings", lambda: ceilings(bench, engine))
        bench.part(f"{model}/decode", lambda: decode(bench, model, engine))
        bench.part(f"{model}/prefill", lambda: prefill(bench, model, engine))
        bench.part(f"{model}/contexts", lambda: contexts(bench, model, engine))
        bench.part(f"{model}/profile", lambda: profile(bench, model, engine))
    finally:
        engine.close()
    gc.collect()
    bench.part(f"{model}/startup", lambda: startup(bench, model, folder))


def load(folder: Path, settings: CudaSettings, step_tokens: int = CHUNK) -> CudaEngine:
    pages = 64 * pages_for(LONGEST)
    options = EngineOptions(
        folder, max_sequences=64, max_step_tokens=step_tokens, kv_pages=pages, max_sequence_length=LONGEST
    )
    return load_cuda_engine(options, None, settings)


def fill_pages(engine: CudaEngine) -> None:
    """Normal noise in all KV pages: a block from the host, doubled on the device."""
    parts = engine.parts
    noise = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    bits = (noise.view(np.uint32) >> 16).astype(np.uint16)
    first = parts.arena.tensor("kv.0.k").address
    size = parts.arena.address + parts.arena.bytes - first
    from cuda.bindings import driver

    driver.cuMemcpyHtoD(first, bits.ctypes.data, bits.nbytes)
    done = bits.nbytes
    while done < size:
        count = min(done, size - done)
        parts.stream.copy_on_device(first + done, first, count)
        done += count
    parts.stream.synchronize()


def decode(bench: Bench, model: str, engine: CudaEngine) -> None:
    for count, sampling, label in (
        (1, GREEDY, ""),
        (8, GREEDY, ""),
        (64, GREEDY, ""),
        (64, DRAWN, " sampled"),
    ):
        rates, idle, steps = [], [], []
        for _ in range(3):
            streams = Streams(engine, count, 128, 448, sampling)
            streams.decode(4)
            seconds = streams.decode(252)
            rates.append(count * 252 / seconds)
            idle += streams.idle_us[8:]
            steps += streams.step_us[8:]
        share = 100 * statistics.median(idle) / (statistics.median(idle) + statistics.median(steps))
        note = f"context 128 → 384, step {statistics.median(steps):.0f} µs"
        bench.add(f"decode ×{count}{label}", "tok/s", rates, model=model, note=note)
        bench.add(f"idle between steps ×{count}{label}", "%", [share], model=model)


def contexts(bench: Bench, model: str, engine: CudaEngine) -> None:
    for context in (512, 2048, 8192):
        rates = []
        for _ in range(2):
            streams = Streams(engine, 64, context, LONGEST, GREEDY)
            streams.decode(4)
            rates.append(64 * 40 / streams.decode(40))
        bench.add(f"decode ×64 at context {context:,}", "tok/s", rates, model=model)


def prefill(bench: Bench, model: str, engine: CudaEngine) -> None:
    prompts = _prompts(engine, 8)
    for _ in range(2):
        engine.execute(_prompt_plan(prompts, [0])).result()
    rates, first = [], []
    for _ in range(5):
        began = time.perf_counter()
        engine.execute(_prompt_plan(prompts, [0])).result()
        first.append((time.perf_counter() - began) * 1e3)
    together = bench.step_tokens // CHUNK
    for _ in range(5):
        began = time.perf_counter()
        handles = [
            engine.execute(_prompt_plan(prompts, range(slot, slot + together)))
            for slot in range(0, 8, together)
        ]
        for handle in handles:
            handle.result()
        rates.append(8 * CHUNK / (time.perf_counter() - began))
    note = f"{bench.step_tokens:,} tokens a pass"
    bench.add("prefill 8 × 2,048", "tok/s", rates[1:], model=model, note=note)
    bench.add("first token of 2,048", "ms", first, model=model)


def _prompts(engine: CudaEngine, count: int) -> np.ndarray:
    random = np.random.default_rng(1)
    return random.integers(3, engine.info.vocab_size, (count, CHUNK)).astype(np.int32)


def _prompt_plan(prompts: np.ndarray, slots: Sequence[int]) -> StepPlan:
    """Whole prompts of CHUNK tokens into slots."""
    each = pages_for(CHUNK)
    return StepPlan(
        2,
        starts=tuple(SlotStart(slot, GREEDY, prompts[slot], prompts[slot][:0]) for slot in slots),
        pages=tuple(PageAssignment(slot, i, slot * each + i) for slot in slots for i in range(each)),
        prefills=tuple(PrefillChunk(slot, prompts[slot], 0, True) for slot in slots),
    )


def profile(bench: Bench, model: str, engine: CudaEngine) -> None:
    """Time of each kind of call, replayed alone in a graph over all layers."""
    for count in WIDTHS:
        Streams(engine, count, 256, 448, GREEDY).decode(2)
        bench.details[f"{model} profile decode ×{count}, µs"] = profile_decode(engine, count)
    engine.execute(_prompt_plan(_prompts(engine, 1), [0])).result()
    bench.details[f"{model} profile prefill {CHUNK}, µs"] = profile_prefill(engine, CHUNK)
    for name, parts in bench.details.items():
        if name.startswith(f"{model} profile"):
            print(name, {key: round(value, 1) for key, value in parts.items()}, flush=True)


def startup(bench: Bench, model: str, folder: Path) -> None:
    """Again, with all graphs of serving, kernels compiled and products not tuned anew."""
    engine = load(folder, CudaSettings(tune=False))
    bench.details[f"{model} start, s"] = engine.startup
    note = ", ".join(f"{name} {seconds:.2f}" for name, seconds in engine.startup.items() if name != "total")
    bench.add("start to ready", "s", [engine.startup["total"]], model=model, note=note)
    engine.close()


def ceilings(bench: Bench, engine: CudaEngine) -> None:
    """Copy bandwidth, bytes read plus written, and the rate of a large product."""
    if any(figure.name == "copy" for figure in bench.figures):
        return
    parts = engine.parts
    first = parts.arena.tensor("kv.0.k").address
    size = 4 << 30
    rates = []
    for _ in range(6):
        seconds = timed(engine, lambda: parts.stream.copy_on_device(first + size, first, size))
        rates.append(2 * size / seconds / 1e12)
    bench.add("copy", "TB/s", rates[1:])
    planner = GemmPlanner(parts.device, cache_folder=None)
    key = GemmKey(8192, 8192, 8192)
    planner.plan_all([key])
    tuned = planner._tuned[key]
    bench.add("bf16 product 8,192³", "TFLOP/s", [key.flops / tuned.microseconds / 1e6])
    planner.close()


def timed(engine: CudaEngine, enqueue: Callable[[], None]) -> float:
    from engine.cuda.device import Event

    start, end = Event(timing=True), Event(timing=True)
    stream = engine.parts.stream
    stream.record(start)
    enqueue()
    stream.record(end)
    end.synchronize()
    return end.milliseconds_since(start) / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="engine")
    parser.add_argument("--models", nargs="+", default=["qwen3-1.7b", "qwen3-8b"], choices=sorted(MODELS))
    everything = ("ceilings", "decode", "prefill", "contexts", "profile", "startup")
    parser.add_argument("--parts", nargs="+", default=everything, choices=everything)
    parser.add_argument("--step-tokens", type=int, default=4 * CHUNK, help="prompt tokens of one pass")
    parser.add_argument("--no-skinny", action="store_true")
    parser.add_argument("--residual", choices=("bf16", "f32"), default="bf16")
    bench = Bench(parser.parse_args())
    for model in bench.models:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            try:
                make_random_checkpoint(Path(folder), model)
                measure(bench, model, Path(folder))
            except Exception:  # noqa: BLE001 - the other models are to run all the same
                bench.failures[model] = traceback.format_exc()
                print(bench.failures[model], flush=True)
    bench.write()
    print(table(bench.figures))
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
