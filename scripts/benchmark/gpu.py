"""The CUDA engine on the GPU present, in one run: ceilings, the engine in-process, the same through gRPC, and
transformers where it is installed. Random weights of real shapes; every figure beside the limit that the
ceilings set.

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
from scripts.benchmark.gpu_bounds import Shape
from scripts.benchmark.machine import ROOT
from scripts.benchmark.server import measure, serving
from scripts.gpu.make_random_checkpoint import MODELS, make_random_checkpoint
from service.cli.load import Load

DEFAULT_MODELS = ("qwen3-1.7b", "qwen3-8b")
STREAMS = 64
PROMPT = 2048
PARTS = ("ceilings", "decode", "prefill", "contexts", "profile", "startup")
_TIMEOUT_S = 900
"""Of one script."""

Save = Callable[["GpuReport"], None]


@dataclass
class GpuReport:
    """What there is so far."""

    figures: list[Figure] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def find(self, name: str) -> Figure | None:
        return next((figure for figure in self.figures if figure.name == name), None)


def why_not() -> str | None:
    """What stands in the way of measuring here; None if nothing does."""
    if find_spec("cuda") is None:
        return "cuda is not installed (pip install 'slipstream-serve[cuda]')"
    from engine.cuda.device import why_no_gpu

    return why_no_gpu(0)


def run(repeats: int, models: Sequence[str], peers: bool, save: Save) -> GpuReport:
    """Some minutes a model. `save` is called after each part, so that what was measured is not lost."""
    report = GpuReport()
    for model in models:
        part(report, f"{model} in-process", lambda model=model: in_process(report, model), save)
        part(report, f"{model} through gRPC", lambda model=model: through_grpc(report, model, repeats), save)
    if peers:
        for model in models:
            part(report, f"{model} transformers", lambda model=model: transformers(report, model), save)
    return report


def part(report: GpuReport, name: str, measurement: Callable[[], None], save: Save) -> None:
    """A part that fails is told; the others run all the same."""
    print(f"  {name} …", file=sys.stderr, flush=True)
    try:
        measurement()
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        report.failures[name] = f"{type(error).__name__}: {error}"
        print(f"  {name}: {report.failures[name]}", file=sys.stderr, flush=True)
    save(report)


def in_process(report: GpuReport, model: str) -> None:
    """bench_engine.py's figures; the ceilings are measured with the first model alone."""
    parts = PARTS if report.find("copy") is None else PARTS[1:]
    document = _script("bench_engine", "--models", model, "--name", "figures", "--parts", *parts)
    report.figures += list(_with_limits(report, document["figures"], model))
    report.details |= document["details"]
    report.failures |= document["failures"]


def transformers(report: GpuReport, model: str) -> None:
    """bench_transformers.py's figures, where torch and transformers are installed."""
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        report.details["transformers"] = f"not measured: {', '.join(missing)} not installed"
        return
    document = _script("bench_transformers", "--models", model, name="transformers")
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


def _with_limits(report: GpuReport, documents: Sequence[dict[str, Any]], model: str) -> Iterator[Figure]:
    figures = [from_json(document) for document in documents]
    report_and_new = GpuReport([*report.figures, *figures])
    copy, product = report_and_new.find("copy"), report_and_new.find("bf16 product 8,192³")
    for figure in figures:
        if copy is None or product is None:
            yield figure
            continue
        limit = limit_of(figure, model, copy.median * 1e12, product.median * 1e12)
        if limit is None:
            yield figure
            continue
        share = 100 * (limit / figure.median if figure.unit == "ms" else figure.median / limit)
        note = f"limit by the ceilings {limit:,.4g} {figure.unit}: {share:.0f}%"
        yield replace(figure, note=f"{figure.note}; {note}" if figure.note else note)


def limit_of(figure: Figure, model: str, bandwidth: float, flops: float) -> float | None:
    """In the figure's unit: by bytes for decode, by products for prompts; None where there is none."""
    shape = Shape.of(MODELS[model])
    name = figure.name.removeprefix(f"{model} ")
    if decode := re.fullmatch(r"decode ×(\d+)(?: sampled| at context ([\d,]+))?", name):
        context = float(decode[2].replace(",", "")) if decode[2] else 256.0
        return shape.decode_limit(int(decode[1]), context, bandwidth)
    if name == "prefill 8 × 2,048":
        return shape.prefill_limit(PROMPT, flops)
    if name == "first token of 2,048":
        return 1e3 * shape.prefill_flops(PROMPT) / flops
    return None


def through_grpc(report: GpuReport, model: str, repeats: int) -> None:
    """The same shapes from a client's side, on a server of its own."""
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    rates, whole, first = [], [], []
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        make_random_checkpoint(Path(folder), model)
        with serving(folder, "--engine", "cuda", "--max-sequences", str(STREAMS), "--fronts", "4") as at:
            measure(at, Load(streams=STREAMS, requests=STREAMS, prompt_tokens=128, max_tokens=64, seed=99))
            for seed in range(repeats):
                batch = Load(streams=STREAMS, requests=STREAMS, prompt_tokens=128, max_tokens=256, seed=seed)
                summary = measure(at, batch)
                assert summary.inter_token_ms is not None
                rates.append(STREAMS * 1e3 / summary.inter_token_ms.mean)
                whole.append(summary.tokens_per_s)
                alone = Load(streams=1, requests=20, prompt_tokens=PROMPT, max_tokens=2, seed=100 + seed)
                summary = measure(at, alone)
                assert summary.first_token_ms is not None
                first.append(summary.first_token_ms.p50)
    report.figures += list(grpc_figures(report, model, rates, whole, first))


def grpc_figures(
    report: GpuReport, model: str, rates: Sequence[float], whole: Sequence[float], first: Sequence[float]
) -> Iterator[Figure]:
    """What came through, and how it compares with the engine in-process."""
    yield Figure(
        f"{model} ×{STREAMS} through gRPC, 128 + 256 tokens", "tok/s", tuple(whole), note="whole run"
    )
    decode = report.find(f"{model} decode ×{STREAMS}")
    if decode is not None:
        shares = tuple(100 * rate / decode.median for rate in rates)
        note = "by the mean time between tokens"
        yield Figure(
            f"{model} ×{STREAMS} through gRPC against in-process", "%", shares, at_least=90, note=note
        )
    alone = report.find(f"{model} first token of 2,048")
    yield Figure(f"{model} first token of 2,048 through gRPC, p50", "ms", tuple(first))
    if alone is not None:
        more = tuple(value - alone.median for value in first)
        yield Figure(f"{model} first token through gRPC, over in-process", "ms", more, at_most=2.0)
