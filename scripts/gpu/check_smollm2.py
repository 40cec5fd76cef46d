"""The demo model, real weights, through the CUDA engine: 64 greedy tokens on ten prompts, as transformers.

    split -b 48m SmolLM2-135M-Instruct.Q4_1.gguf parts/smollm2.
    PYTHONPATH=. python scripts/gpu/check_smollm2.py --model-parts parts/smollm2.* --out build/check
    PYTHONPATH=. python scripts/gpu/check_smollm2.py --model FILE.gguf --engine reference

The ten run side by side, in one batch. Where a token differs, both answers are decoded again with their
tokens forced, and each token must be likeliest but for --noise, the rounding of the engine's precision: a tie
may go either way, a wrong model may not. --model-parts joins pieces of the file, for machines that take files
only up to some size. Writes check_smollm2.json; exit code 1 if an answer is wrong.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from engine.factory import load_engine
from engine.interface import Engine, Sampling, TokenLogprobs
from engine.options import EngineOptions
from tests.parity.reference_driver import Driver

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "parity" / "golden" / "smollm2.json"
NOISE = 0.25
"""The widest gap that transformers itself, in bf16, leaves when it is forced through these ten answers."""
FORCED = Sampling(temperature=0.0, prompt_logprobs=2)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path)
    source.add_argument("--model-parts", type=Path, nargs="+", help="joined in the order of their names")
    parser.add_argument("--engine", default="cuda")
    parser.add_argument("--noise", type=float, default=NOISE, help="nats that may part two equals in bf16")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = json.loads(GOLDEN.read_text())["cases"]
    with ExitStack() as stack:
        model = options.model or join(options.model_parts, stack)
        engine = load_engine(
            EngineOptions(
                model, engine=options.engine, max_sequences=len(cases), max_step_tokens=512,
                max_sequence_length=256, kv_pages=128,
            )
        )  # fmt: skip
        stack.enter_context(closing(engine))
        report = check(engine, cases, options.noise)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "check_smollm2.json").write_text(json.dumps(report, indent=1))
    print(as_table(report))
    return 0 if report["holds"] else 1


def join(parts: Sequence[Path], stack: ExitStack) -> Path:
    """One file of all parts, for as long as the stack lives."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    whole = folder / "model.gguf"
    with whole.open("wb") as sink:
        for part in sorted(parts, key=lambda path: path.name):
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, sink, 1 << 24)
    return whole


def check(engine: Engine, cases: Sequence[dict[str, Any]], noise: float) -> dict[str, Any]:
    """Per prompt: how many tokens agree, and the widest gap that forced decoding met."""
    answers = decode(engine, [case["prompt"] for case in cases], len(cases[0]["tokens"]))
    prompts = []
    for case, tokens in zip(cases, answers, strict=True):
        wanted = case["tokens"]
        same = next(
            (i for i, pair in enumerate(zip(tokens, wanted, strict=True)) if pair[0] != pair[1]), len(wanted)
        )
        gaps = forced_gaps(engine, case["prompt"], wanted)
        if same < len(wanted):
            gaps += forced_gaps(engine, case["prompt"], tokens)
        prompts.append(
            {
                "agreeing": same,
                "of": len(wanted),
                "smallest_margin": case["smallest_margin"],
                "widest_gap": max(gaps),
                "holds": same == len(wanted) or max(gaps) <= noise,
                "got": tokens,
            }
        )
    return {
        "engine": engine.info.engine,
        "device": engine.info.device,
        "weights": engine.info.weight_dtype,
        "noise": noise,
        "equal": sum(prompt["agreeing"] == prompt["of"] for prompt in prompts),
        "holds": all(prompt["holds"] for prompt in prompts),
        "prompts": prompts,
    }


def decode(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """`count` greedy tokens of every prompt, in one batch."""
    driver = Driver(engine)
    for slot, prompt in enumerate(prompts):
        driver.start(slot, prompt)
    for slot in range(len(prompts)):
        driver.prefill(slot)
    driver.decode(count - 1)
    driver.step(releases=range(len(prompts)))
    return [driver.tokens[slot] for slot in range(len(prompts))]


def forced_gaps(engine: Engine, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """How far each token of the answer lies below the likeliest one, in nats, given all before it."""
    driver = Driver(engine)
    driver.start(0, [*prompt, *answer], FORCED)
    driver.prefill(0)
    driver.step(releases=[0])
    entries: list[TokenLogprobs] = driver.prompt_logprobs[0][len(prompt) - 1 :]
    return [entry.top_logprobs[0] - entry.logprob for entry in entries]


def as_table(report: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        f"{report['engine']} on {report['device']}, weights {report['weights']}: {report['equal']} of "
        f"{len(report['prompts'])} answers equal; noise allowed {report['noise']} nats",
        "",
        "| prompt | tokens agreeing | transformers' smallest margin | widest gap, forced | |",
        "| ---: | ---: | ---: | ---: | --- |",
    ]
    for number, prompt in enumerate(report["prompts"]):
        verdict = "holds" if prompt["holds"] else "**wrong**"
        lines.append(
            f"| {number} | {prompt['agreeing']} of {prompt['of']} | {prompt['smallest_margin']:.4f} "
            f"| {prompt['widest_gap']:.4f} | {verdict} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
