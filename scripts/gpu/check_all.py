"""Everything that is to be seen on a GPU, in one command that keeps to a time and tells what it left out.

    PYTHONPATH=. python scripts/gpu/check_all.py --out build/gpu --budget 580 --model-parts parts/smollm2.*
    PYTHONPATH=. python scripts/gpu/check_all.py --out build/gpu --only soak smollm2

Steps run in order, each in a process of its own with a log in the folder given and at most its own time; one
that no longer fits into the budget is left out. summary.json says what came of each. Exit code 1 if a step
failed, 2 if none did and some were left out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.benchmark.gpu import why_not

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "gpu"
TAIL = 12
"""Last lines of a log that are shown: a script's table, or a test run's summary."""
FAILED_TAIL = 40


@dataclass(frozen=True, slots=True)
class Step:
    """One check."""

    name: str
    command: tuple[str, ...]
    limit_s: int
    """It is ended after so long."""
    least_s: int
    """Not worth starting with less."""


@dataclass(frozen=True, slots=True)
class Outcome:
    step: str
    state: str
    """"passed", "failed", "cut" or "left out"."""
    seconds: float = 0.0


def steps(out: Path, model: Sequence[str], shapes: Sequence[str]) -> list[Step]:
    """In the order in which they are worth having. `model`: the flags that name the demo model's file."""
    python, folder = sys.executable, str(out)
    tests = [python, "-m", "pytest", "tests/gpu", f"--confcutdir={ROOT / 'tests' / 'gpu'}"]
    found = [
        Step("build", (python, "-m", "service.cli", "kernels", "build"), 180, 10),
        Step("tests", (*tests, "-p", "no:cacheprovider"), 300, 30),
        *_engine_steps(out),
    ]
    if model:
        smollm2 = (python, str(SCRIPTS / "check_smollm2.py"), *model, "--out", folder)
        found.append(Step("smollm2", smollm2, 120, 20))
        recorded = ("--reference", str(ROOT / "benchmarks" / "perplexity-reference.json"))
        perplexity = (python, str(SCRIPTS / "perplexity.py"), *model, "--engines", "cuda", *recorded)
        found.append(Step("perplexity", (*perplexity, "--out", folder), 120, 20))
    found += _soak_steps(out)
    kernels = (python, str(SCRIPTS / "check_kernels.py"), "--out", folder, "--only")
    found.append(Step("memcheck", (*kernels, "memcheck"), 240, 60))
    found.append(Step("racecheck", (*kernels, "racecheck"), 240, 60))
    return [*found, *_bench_steps(out, shapes)]


def _engine_steps(out: Path) -> list[Step]:
    """The scenarios and transformers; then the tiers."""
    parts = {
        "engine": ("--skip", "tier"),
        "engine-q4": ("--only", "tier q4"),
        "engine-fp8": ("--only", "tier fp8", "tier bf16"),
    }
    script = (sys.executable, str(SCRIPTS / "check_engine.py"))
    return [Step(name, (*script, *flags, "--out", str(out / name)), 240, 20) for name, flags in parts.items()]


def _soak_steps(out: Path) -> list[Step]:
    """On the model that foretells its tokens, where any wrong one shows; then on weights like real ones."""
    script = (sys.executable, str(SCRIPTS / "soak.py"), "--engine", "cuda")
    few = ("--requests", "1500")
    parts = {
        "soak": ("--model", "recall"),
        "soak-q4": ("--model", "recall", "--precision", "q4", *few),
        "soak-fp8": ("--model", "recall", "--precision", "fp8", "--kv-dtype", "fp8", *few),
        "soak-random": ("--model", "qwen3-1.7b", *few),
    }
    return [Step(name, (*script, *flags, "--out", str(out / name)), 300, 40) for name, flags in parts.items()]


def _bench_steps(out: Path, shapes: Sequence[str]) -> list[Step]:
    """All tiers of a shape in one run, as its checkpoint is written once; each tier takes 25 s at most."""
    python, found = sys.executable, []
    for shape in shapes:
        bench = (python, str(ROOT / "scripts" / "bench"), "gpu", "--no-peers", "--quick", "--models", shape)
        flags = ("--precision", "bf16", "q4", "fp8", "--out", str(out / f"bench-{shape}"))
        found.append(Step(f"bench-{shape}", (*bench, *flags), 400, 90))
    script = (python, str(SCRIPTS / "bench_engine.py"), "--quick", "--out", str(out))
    cached = ("--kv-dtype", "fp8", "--precision", "bf16", "fp8", "--parts", "ceilings", "decode", "contexts")
    for shape in shapes:
        kv = (*script, *cached, "--models", shape, "--name", f"bench-kv-{shape}")
        found.append(Step(f"bench-kv-{shape}", kv, 120, 40))
    llama = ("--models", "llama-3.1-8b", "--precision", "q4", "--widths", "1", "--name", "bench-llama")
    found.append(Step("bench-llama", (*script, *llama, "--parts", "ceilings", "decode"), 90, 30))
    for shape in shapes:
        peer = (python, str(SCRIPTS / "bench_transformers.py"), "--models", shape, "--budget", "150")
        found.append(Step(f"peer-{shape}", (*peer, "--out", str(out / f"peer-{shape}")), 250, 60))
    return found


def main() -> int:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.model_parts:
        model = ["--model-parts", *map(str, options.model_parts)]
    else:
        model = ["--model", str(options.model)] if options.model else []
    chosen = steps(options.out.resolve(), model, options.shapes)
    known = [step.name for step in chosen]
    wrong = [name for name in (*options.only, *options.skip) if not any(n.startswith(name) for n in known)]
    if wrong:
        print(f"there is no step {', '.join(wrong)}; there are {', '.join(known)}", file=sys.stderr)
        return 1
    if reason := why_not():
        print(f"nothing can be checked here: {reason}", file=sys.stderr)
        return 1
    end = time.monotonic() + options.budget
    outcomes = []
    for step in chosen:
        if options.only and not step.name.startswith(tuple(options.only)):
            continue
        if options.skip and step.name.startswith(tuple(options.skip)):
            continue
        outcomes.append(run(step, options.out, end))
        _write(options.out, outcomes)
    print("\n".join(f"{one.seconds:7.1f} s  {one.state:8}  {one.step}" for one in outcomes))
    states = {one.state for one in outcomes}
    if states & {"failed", "cut"}:
        return 1
    return 2 if "left out" in states else 0


def run(step: Step, out: Path, end: float) -> Outcome:
    """Runs a step until it is over, its limit or the budget's end."""
    left = end - time.monotonic()
    if left < step.least_s:
        return Outcome(step.name, "left out")
    log = out / f"{step.name}.log"
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=_environment(), stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            state = "passed" if process.wait(min(left, step.limit_s)) == 0 else "failed"
        except subprocess.TimeoutExpired:
            state = "cut"
        finally:
            if process.poll() is None:
                end_group(process)
    seconds = time.monotonic() - began
    lines = log.read_text(errors="replace").splitlines()
    print(f"--- {step.name}: {state} in {seconds:.1f} s")
    print(*lines[-(TAIL if state == "passed" else FAILED_TAIL) :], sep="\n", flush=True)
    return Outcome(step.name, state, round(seconds, 1))


def end_group(process: subprocess.Popen[bytes]) -> None:
    """The step and all that it has started: a server of its own would keep the GPU's memory."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _environment() -> dict[str, str]:
    paths = (str(ROOT), str(ROOT / "tests" / "gpu"), os.environ.get("PYTHONPATH", ""))
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _write(out: Path, outcomes: Sequence[Outcome]) -> None:
    (out / "summary.json").write_text(json.dumps([asdict(one) for one in outcomes], indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=3600, help="seconds for all steps")
    parser.add_argument("--only", nargs="+", default=[], metavar="STEP", help="steps that begin with these")
    parser.add_argument("--skip", nargs="+", default=[], metavar="STEP")
    parser.add_argument("--model", type=Path, help="the demo model's .gguf file")
    parser.add_argument("--model-parts", type=Path, nargs="+", help="the same in pieces")
    parser.add_argument("--shapes", nargs="+", default=["qwen3-1.7b", "qwen3-8b"])
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
