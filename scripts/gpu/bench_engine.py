"""Measures the CUDA engine in-process, beside the ceilings of the same card, on random checkpoints.

    PYTHONPATH=. python scripts/gpu/bench_engine.py --out benchmarks --name engine-h200 \
        [--models qwen3-1.7b qwen3-8b] [--precision bf16 q4 fp8] [--kv-dtype bf16 fp8] \
        [--parts decode prefill serving contexts] [--quick]

Every model in every precision with every KV cache asked for. A model's checkpoint is written once, into
memory, or taken from --checkpoints. KV pages are filled with noise, never zeros. Only the widths and sizes
measured are tuned and captured. --quick: two repeats, and no part is begun once a tier has had --seconds. A
failure in one part does not stop the others. Writes NAME.json and NAME.md into the folder given.
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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine.cuda.engine import CudaEngine
from engine.cuda.gemm import GemmKey, GemmPlanner
from engine.cuda.loading import load_cuda_engine
from engine.cuda.settings import CudaSettings
from engine.interface import pages_for
from engine.options import EngineOptions, KvDtype, Precision
from kernels.tensor import DType
from scripts.benchmark.figures import Figure, table
from scripts.benchmark.gpu_bounds import Tier
from scripts.benchmark.gpu_goals import goal
from scripts.gpu.bench_streams import (
    CHUNK,
    DRAWN,
    GREEDY,
    Streams,
    fill_pages,
    prompt_plan,
    random_tokens,
)
from scripts.gpu.engine_profile import profile_decode, profile_prefill
from scripts.gpu.make_random_checkpoint import MODELS, make_random_checkpoint

ROWS = 64
"""Sequences at most."""
WIDTHS = (1, 8, ROWS)
START, STEPS = 128, 252
"""Of a decode run: its context at the start, and steps that count, after 4 that do not."""
CONTEXTS = (512, 2048, 4096, 8192)
LONGEST = 8192 + 512
PARTS = ("ceilings", "decode", "prefill", "serving", "contexts", "profile", "startup")
SERVED = (ROWS, 128, 256)
"""Streams, prompt tokens and output tokens of the part "serving": the load that gRPC is measured with."""


class Bench:
    """The figures of a run, and what is measured of each tier."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model = ""
        self.tier = Tier()
        self.figures: list[Figure] = []
        self.details: dict[str, Any] = {}
        self.failures: dict[str, str] = {}
        self._end = float("inf")

    def begin(self, model: str, tier: Tier) -> None:
        """From here on figures are of this model in this tier."""
        self.model, self.tier = model, tier
        self._end = time.monotonic() + self.options.seconds

    @property
    def subject(self) -> str:
        return f"{self.model} {self.tier.name}"

    def part(self, name: str, run: Callable[[], None]) -> None:
        """Runs one part, if it was asked for and there is time, and writes what there is so far."""
        if name not in self.options.parts:
            return
        began = time.monotonic()
        if began > self._end:
            self.failures[f"{self.subject} {name}"] = f"left out after {self.options.seconds:.0f} s"
            return
        try:
            run()
        except Exception:  # noqa: BLE001 - the other parts are to run all the same
            self.failures[f"{self.subject} {name}"] = traceback.format_exc()
            traceback.print_exc(file=sys.stdout)
        print(f"{time.monotonic() - began:6.1f} s  {self.subject} {name}", flush=True)
        self.write()

    def add(self, name: str, unit: str, runs: Sequence[float], note: str = "") -> None:
        """A figure of the model and tier at hand, beside its goal."""
        figure = Figure(f"{self.subject} {name}", unit, tuple(runs), note=note)
        self.figures.append(goal(figure, self.model, self.tier, name))
        print(f"    {figure.name}: {figure.median:,.5g} {unit}  {note}", flush=True)

    def ceiling(self, name: str, unit: str, runs: Sequence[float]) -> None:
        self.figures.append(Figure(name, unit, tuple(runs)))
        print(f"    {name}: {self.figures[-1].median:,.5g} {unit}", flush=True)

    def write(self) -> None:
        out, name = self.options.out, self.options.name
        out.mkdir(parents=True, exist_ok=True)
        document = {
            "figures": [figure.as_json() for figure in self.figures],
            "details": self.details,
            "failures": self.failures,
        }
        (out / f"{name}.json").write_text(json.dumps(document, indent=1, ensure_ascii=False))
        where = self.details.get("machine", {})
        heading = ", ".join(f"{key} {value}" for key, value in where.items())
        (out / f"{name}.md").write_text(f"{heading}\n\n{table(self.figures)}")


def measure(bench: Bench, folder: Path) -> None:
    """All parts of the model and tier at hand."""
    began = time.monotonic()
    sizes = tuple(sorted({16, CHUNK, bench.options.step_tokens}))
    settings = CudaSettings(
        decode_widths=tuple(bench.options.widths), prefill_sizes=sizes, skinny=not bench.options.no_skinny
    )
    engine = load(folder, bench.tier, settings, bench.options.step_tokens)
    try:
        bench.details.setdefault("machine", {"card": engine.info.device} | engine.info.versions)
        bench.details[f"{bench.subject} first start, s"] = engine.startup
        bench.details[f"{bench.subject} memory"] = engine.info.memory_plan
        bench.details[f"{bench.subject} fallbacks"] = engine.info.fallbacks
        print(bench.subject, {key: round(value, 2) for key, value in engine.startup.items()}, flush=True)
        fill_pages(engine)
        bench.part("ceilings", lambda: ceilings(bench, engine))
        bench.part("decode", lambda: decode(bench, engine))
        bench.part("prefill", lambda: prefill(bench, engine))
        bench.part("serving", lambda: serving(bench, engine))
        bench.part("contexts", lambda: contexts(bench, engine))
        bench.part("profile", lambda: profile(bench, engine))
    finally:
        engine.close()
    gc.collect()
    bench.part("startup", lambda: startup(bench, folder))
    bench.details[f"{bench.subject} measured in, s"] = round(time.monotonic() - began, 1)


def load(folder: Path, tier: Tier, settings: CudaSettings, step_tokens: int = CHUNK) -> CudaEngine:
    options = EngineOptions(
        folder, max_sequences=ROWS, max_step_tokens=step_tokens, kv_pages=ROWS * pages_for(LONGEST),
        max_sequence_length=LONGEST, precision=Precision(tier.precision), kv_dtype=KvDtype(tier.kv_dtype),
    )  # fmt: skip
    return load_cuda_engine(options, None, settings)


def decode(bench: Bench, engine: CudaEngine) -> None:
    """From context 128 to 384."""
    ways = [(count, GREEDY, "") for count in bench.options.widths]
    if ROWS in bench.options.widths and not bench.options.quick:
        ways.append((ROWS, DRAWN, " sampled"))
    for count, sampling, label in ways:
        rates, idle, steps = [], [], []
        for _ in range(bench.options.repeats):
            streams = Streams(engine, count, START, START + STEPS + 4, sampling)
            streams.decode(4)
            rates.append(count * STEPS / _seconds(lambda streams=streams: streams.decode(STEPS)))
            idle += streams.idle_us[8:]
            steps += streams.step_us[8:]
        share = 100 * statistics.median(idle) / (statistics.median(idle) + statistics.median(steps))
        note = f"context 128 → 384, step {statistics.median(steps):.0f} µs"
        bench.add(f"decode ×{count}{label}", "tok/s", rates, note)
        bench.add(f"idle between steps ×{count}{label}", "%", [share])


def contexts(bench: Bench, engine: CudaEngine) -> None:
    """Rows far into their sequences, where keys and values outweigh the weights."""
    steps = 20 if bench.options.quick else 40
    for context in CONTEXTS:
        rates = []
        for _ in range(2):
            streams = Streams(engine, ROWS, context, LONGEST, GREEDY)
            streams.decode(4)
            rates.append(ROWS * steps / _seconds(lambda streams=streams: streams.decode(steps)))
        bench.add(f"decode ×{ROWS} at context {context:,}", "tok/s", rates)


def prefill(bench: Bench, engine: CudaEngine) -> None:
    """Whole prompts of 2,048 tokens: one alone, then eight, as many in a pass as a step holds."""
    prompts = random_tokens(engine, (8, CHUNK), seed=1)
    together = bench.options.step_tokens // CHUNK
    groups = [range(slot, slot + together) for slot in range(0, 8, together)]

    def all_prompts() -> None:
        for handle in [engine.execute(prompt_plan(prompts, slots)) for slots in groups]:
            handle.result()

    def one_prompt() -> None:
        engine.execute(prompt_plan(prompts, [0])).result()

    one_prompt()
    all_prompts()
    repeats = bench.options.repeats + 1
    first = [1e3 * _seconds(one_prompt) for _ in range(repeats)]
    rates = [8 * CHUNK / _seconds(all_prompts) for _ in range(repeats)]
    bench.add("prefill 8 × 2,048", "tok/s", rates, f"{bench.options.step_tokens:,} tokens a pass")
    bench.add("first token of 2,048", "ms", first)


def serving(bench: Bench, engine: CudaEngine) -> None:
    """The load that gRPC is measured with, given by plans: prompts first, then steps, to the last token."""
    count, prompt, output = SERVED
    prompts = random_tokens(engine, (count, prompt), seed=2)
    rates = []
    for repeat in range(bench.options.repeats + 1):
        began = time.perf_counter()
        streams = Streams(engine, count, prompt, prompt + output, GREEDY, prompts)
        streams.decode(output - 1)
        seconds = time.perf_counter() - began
        if repeat:
            rates.append(streams.tokens / seconds)
    bench.add(f"×{count} whole, {prompt} + {output} tokens", "tok/s", rates, "prompts included")


def profile(bench: Bench, engine: CudaEngine) -> None:
    """Time of each kind of call, replayed alone in a graph over all layers."""
    for count in bench.options.widths:
        Streams(engine, count, 256, 448, GREEDY).decode(2)
        bench.details[f"{bench.subject} profile decode ×{count}, µs"] = profile_decode(engine, count)
    prompts = random_tokens(engine, (8, CHUNK), seed=1)
    for size in sorted({CHUNK, bench.options.step_tokens}):
        engine.execute(prompt_plan(prompts, range(size // CHUNK))).result()
        bench.details[f"{bench.subject} profile prefill {size:,}, µs"] = profile_prefill(engine, size)
    for name, parts in bench.details.items():
        if name.startswith(f"{bench.subject} profile"):
            print(name, {key: round(value, 1) for key, value in parts.items()}, flush=True)


def startup(bench: Bench, folder: Path) -> None:
    """Again, with all graphs of serving, kernels compiled and products not tuned anew."""
    engine = load(folder, bench.tier, CudaSettings(tune=False))
    bench.details[f"{bench.subject} start, s"] = engine.startup
    note = ", ".join(f"{name} {seconds:.2f}" for name, seconds in engine.startup.items() if name != "total")
    bench.add("start to ready", "s", [engine.startup["total"]], note)
    engine.close()


def ceilings(bench: Bench, engine: CudaEngine) -> None:
    """Copy bandwidth, bytes read plus written, and the rates of large products; once a run."""
    if any(figure.name == "copy" for figure in bench.figures):
        return
    parts = engine.parts
    first = parts.arena.tensor("kv.0.k").address
    size = 4 << 30
    rates = []
    for _ in range(6):
        seconds = _device_seconds(engine, lambda: parts.stream.copy_on_device(first + size, first, size))
        rates.append(2 * size / seconds / 1e12)
    bench.ceiling("copy", "TB/s", rates[1:])
    planner = GemmPlanner(parts.device, cache_folder=None)
    for name, dtype in (("bf16", DType.BF16), ("fp8", DType.E4M3)):
        key = GemmKey(8192, 8192, 8192, x=dtype, w=dtype)
        planner.plan_all([key])
        rate = key.flops / planner._tuned[key].microseconds / 1e6
        bench.ceiling(f"{name} product 8,192³", "TFLOP/s", [rate])
    planner.close()


def _seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _device_seconds(engine: CudaEngine, enqueue: Callable[[], None]) -> float:
    from engine.cuda.device import Event

    start, end = Event(timing=True), Event(timing=True)
    stream = engine.parts.stream
    stream.record(start)
    enqueue()
    stream.record(end)
    end.synchronize()
    return end.milliseconds_since(start) / 1e3


def main() -> int:
    options = parse()
    bench = Bench(options)
    tiers = [Tier(precision, kv) for kv in options.kv_dtype for precision in options.precision]
    for model in options.models:
        with ExitStack() as stack:
            folder = options.checkpoints
            if folder is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
            began = time.monotonic()
            if not (folder / model / "config.json").exists():
                make_random_checkpoint(folder / model, model)
            bench.details[f"{model} checkpoint written, s"] = round(time.monotonic() - began, 1)
            for tier in tiers:
                bench.begin(model, tier)
                try:
                    measure(bench, folder / model)
                except Exception:  # noqa: BLE001 - the others are to run all the same
                    bench.failures[bench.subject] = traceback.format_exc()
                    print(bench.failures[bench.subject], flush=True)
                bench.write()
    print(table(bench.figures))
    return 1 if bench.failures else 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's, or those given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="engine")
    parser.add_argument("--models", nargs="+", default=["qwen3-1.7b", "qwen3-8b"], choices=sorted(MODELS))
    parser.add_argument("--precision", nargs="+", default=["bf16"], choices=["bf16", "q4", "fp8"])
    parser.add_argument("--kv-dtype", nargs="+", default=["bf16"], choices=["bf16", "fp8"])
    parser.add_argument("--checkpoints", type=Path, help="folder of checkpoints by model, to keep")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS, help="rows of decode steps")
    parser.add_argument("--step-tokens", type=int, default=4 * CHUNK, help="prompt tokens of one pass")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="for many models and tiers in a few minutes")
    parser.add_argument("--seconds", type=float, help="of one tier, after which no part is begun")
    parser.add_argument("--no-skinny", action="store_true")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats = 2
    if options.seconds is None:
        options.seconds = 25.0 if options.quick else float("inf")
    return options


if __name__ == "__main__":
    sys.exit(main())
