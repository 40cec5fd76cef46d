"""The CUDA engine on the GPU present, in one run: ceilings, the engine in-process, the same through gRPC, and
transformers where it is installed. Random weights of real shapes, in every precision asked for; every figure
beside the limit that the ceilings set.

The in-process part runs in a process of its own, so that its memory is free for the server after it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts.benchmark.figures import Figure
from scripts.benchmark.gpu_bounds import Rates, Shape, Tier
from scripts.benchmark.machine import ROOT
from scripts.benchmark.server import measure, serving
from scripts.benchmark.steady import Run, watch
from scripts.gpu.make_random_checkpoint import MODELS, make_random_checkpoint
from service.cli.load import Load

DEFAULT_MODELS = ("qwen3-1.7b", "qwen3-8b")
STREAMS, PROMPT, OUTPUT = 64, 128, 256
"""Of the load through gRPC: the same as bench_engine.py gives the engine by plans, as SERVED."""
LONG_PROMPT = 2048
PARTS = ("ceilings", "decode", "prefill", "serving", "contexts", "profile", "startup")
_TIMEOUT_S = 900
"""Of one script."""

Save = Callable[["GpuReport"], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure."""

    models: Sequence[str] = DEFAULT_MODELS
    precisions: Sequence[str] = ("bf16",)
    kv_dtypes: Sequence[str] = ("bf16",)
    repeats: int = 5
    peers: bool = True
    grpc: bool = True
    quick: bool = False
    """Few repeats, no part of a tier begun after 25 s, gRPC for the first tier alone."""

    @property
    def tiers(self) -> list[Tier]:
        return [Tier(precision, kv) for kv in self.kv_dtypes for precision in self.precisions]


@dataclass
class GpuReport:
    """What there is so far."""

    figures: list[Figure] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def find(self, name: str) -> Figure | None:
        return next((figure for figure in self.figures if figure.name == name), None)

    def rates(self) -> Rates | None:
        """The ceilings, once they are measured."""
        found = [self.find(name) for name in ("copy", "bf16 product 8,192³", "fp8 product 8,192³")]
        if any(figure is None for figure in found):
            return None
        copy, bf16, fp8 = (figure.median * 1e12 for figure in found if figure is not None)
        return Rates(copy, bf16, fp8)


def why_not() -> str | None:
    """What stands in the way of measuring here; None if nothing does."""
    if find_spec("cuda") is None:
        return "cuda is not installed (pip install 'slipstream-serve[cuda]')"
    from engine.cuda.device import why_no_gpu

    return why_no_gpu(0)


def run(options: Options, save: Save) -> GpuReport:
    """Some minutes a model. `save` is called after each part, so that what was measured is not lost."""
    report = GpuReport()
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    for model in options.models:
        with tempfile.TemporaryDirectory(dir=in_memory) as folder:
            _model(report, options, model, Path(folder), save)
    return report


def _model(report: GpuReport, options: Options, model: str, folder: Path, save: Save) -> None:
    """One checkpoint, written once, for all parts."""

    def do(name: str, measurement: Callable[[], None]) -> None:
        part(report, f"{model} {name}", measurement, save)

    do("checkpoint", lambda: make_checkpoint(folder, model))
    do("in-process", lambda: in_process(report, options, model, folder))
    tiers = options.tiers[:1] if options.quick else options.tiers
    for tier in tiers if options.grpc else ():
        do(f"{tier.name} through gRPC", lambda tier=tier: through_grpc(report, options, model, tier, folder))
    if options.peers:
        do("transformers", lambda: transformers(report, model, folder))


def make_checkpoint(folder: Path, model: str) -> None:
    make_random_checkpoint(folder / model, model)


def part(report: GpuReport, name: str, measurement: Callable[[], None], save: Save) -> None:
    """A part that fails is told; the others run all the same."""
    print(f"  {name} …", file=sys.stderr, flush=True)
    try:
        measurement()
    except (RuntimeError, ValueError, OSError, subprocess.SubprocessError) as error:
        report.failures[name] = f"{type(error).__name__}: {error}"
        print(f"  {name}: {report.failures[name]}", file=sys.stderr, flush=True)
    save(report)


def in_process(report: GpuReport, options: Options, model: str, folder: Path) -> None:
    """bench_engine.py's figures; the ceilings are measured with the first model alone."""
    parts = PARTS if report.rates() is None else PARTS[1:]
    if options.quick:
        parts = tuple(name for name in parts if name not in ("profile", "startup"))
    flags = ["--models", model, "--checkpoints", str(folder), "--name", "figures", "--parts", *parts]
    flags += ["--precision", *options.precisions, "--kv-dtype", *options.kv_dtypes]
    document = _script("bench_engine", *flags, *(["--quick"] if options.quick else []))
    report.figures += list(_with_limits(report, document["figures"]))
    report.details |= document["details"]
    report.failures |= document["failures"]


def transformers(report: GpuReport, model: str, folder: Path) -> None:
    """bench_transformers.py's figures, where torch and transformers are installed."""
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        report.details["transformers"] = f"not measured: {', '.join(missing)} not installed"
        return
    flags = ("--models", model, "--checkpoints", str(folder))
    document = _script("bench_transformers", *flags, name="transformers")
    for figure in map(from_json, document["figures"]):
        report.figures.append(replace(figure, name=f"transformers, {figure.name}"))
    report.details["transformers"] = document["machine"]
    report.failures |= {f"transformers {index}": text for index, text in enumerate(document["failures"])}


def _script(script: str, *flags: str, name: str = "figures") -> dict[str, Any]:
    """Runs scripts/gpu/SCRIPT.py; its JSON, even if a part of it failed. Raises RuntimeError without one."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "scripts" / "gpu" / f"{script}.py"), "--out", folder, *flags]
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, stdout=sys.stderr,
            check=False, timeout=_TIMEOUT_S,
        )  # fmt: skip
        written = Path(folder) / f"{name}.json"
        if not written.exists():
            raise RuntimeError(f"{script} ended with {done.returncode} and wrote no figures")
        document: dict[str, Any] = json.loads(written.read_text())
        return document


def from_json(values: dict[str, Any]) -> Figure:
    """A figure as Figure.as_json wrote it."""
    return Figure(
        values["name"],
        values["unit"],
        tuple(values["runs"]),
        values["at_least"],
        values["at_most"],
        values["note"],
    )


def _with_limits(report: GpuReport, documents: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    figures = [from_json(document) for document in documents]
    rates = GpuReport([*report.figures, *figures]).rates()
    for figure in figures:
        limit = None if rates is None else limit_of(figure, rates)
        if limit is None:
            yield figure
            continue
        share = 100 * (limit / figure.median if figure.unit == "ms" else figure.median / limit)
        note = f"limit by the ceilings {limit:,.4g} {figure.unit}: {share:.0f}%"
        yield replace(figure, note=f"{figure.note}; {note}" if figure.note else note)


_NAME = re.compile(r"(?P<model>\S+) (?P<precision>bf16|q4|fp8)(?:, KV (?P<kv>fp8))? (?P<what>.+)")
_DECODE = re.compile(r"decode ×(\d+)(?: sampled| at context ([\d,]+))?")


def limit_of(figure: Figure, rates: Rates) -> float | None:
    """In the figure's unit: by bytes for decode, by products for prompts; None where there is none."""
    named = _NAME.fullmatch(figure.name)
    if named is None or named["model"] not in MODELS:
        return None
    shape = Shape.of(MODELS[named["model"]])
    tier = Tier(named["precision"], named["kv"] or "bf16")
    if decode := _DECODE.fullmatch(named["what"]):
        context = float(decode[2].replace(",", "")) if decode[2] else 256.0
        return shape.decode_limit(int(decode[1]), context, rates.bandwidth, tier)
    if named["what"] == "prefill 8 × 2,048":
        return shape.prefill_limit(LONG_PROMPT, rates, tier)
    if named["what"] == "first token of 2,048":
        return 1e3 * shape.prefill_seconds(LONG_PROMPT, rates, tier)
    return None


def through_grpc(report: GpuReport, options: Options, model: str, tier: Tier, folder: Path) -> None:
    """The same loads from a client's side, on a server of its own."""
    runs, first = [], []
    flags = ["--engine", "cuda", "--max-sequences", str(STREAMS), "--fronts", "4"]
    flags += ["--precision", tier.precision, "--kv-dtype", tier.kv_dtype]
    repeats = min(options.repeats, 2) if options.quick else options.repeats
    with serving(str(folder / model), *flags) as at:
        watch(at, STREAMS, PROMPT, OUTPUT // 4, seed=99)
        for seed in range(repeats):
            runs.append(watch(at, STREAMS, PROMPT, OUTPUT, seed))
            alone = Load(streams=1, requests=20, prompt_tokens=LONG_PROMPT, max_tokens=2, seed=100 + seed)
            summary = measure(at, alone)
            assert summary.first_token_ms is not None
            first.append(summary.first_token_ms.p50)
    report.figures += list(grpc_figures(report, f"{model} {tier.name}", runs, first))


def grpc_figures(
    report: GpuReport, subject: str, runs: Sequence[Run], first: Sequence[float]
) -> Iterator[Figure]:
    """What came through, and how it compares with the engine in-process, like with like: the steady window
    with decode steps of the same rows and positions, the whole run with the same load given by plans."""
    load = f"{PROMPT} + {OUTPUT} tokens"
    whole = tuple(run.whole_rate() for run in runs)
    steady = tuple(run.steady_rate() for run in runs)
    yield Figure(
        f"{subject} ×{STREAMS} through gRPC, {load}", "tok/s", whole, note="prompts and ramp included"
    )
    yield Figure(f"{subject} ×{STREAMS} through gRPC, steady", "tok/s", steady, note="all streams under way")
    for rates, other, goal in (
        (steady, f"decode ×{STREAMS}", 90.0),
        (whole, f"×{STREAMS} whole, {load}", None),
    ):
        alone = report.find(f"{subject} {other}")
        if alone is not None:
            shares = tuple(100 * rate / alone.median for rate in rates)
            yield Figure(f"{subject} through gRPC against in-process {other}", "%", shares, at_least=goal)
    yield Figure(f"{subject} first token of 2,048 through gRPC, p50", "ms", tuple(first))
    alone = report.find(f"{subject} first token of 2,048")
    if alone is not None:
        more = tuple(value - alone.median for value in first)
        yield Figure(f"{subject} first token through gRPC, over in-process", "ms", more, at_most=2.0)
