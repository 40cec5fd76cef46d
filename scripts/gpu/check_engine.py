"""Checks the CUDA engine on the GPU present: scenarios, every tier, logits against transformers.

The scenarios are those of the tests; a tier's log-probabilities must be those of the reference engine.

    PYTHONPATH=. python scripts/gpu/check_engine.py --out build/check [--shape qwen3-1.7b --layers 4] \
        [--only "tier q4" "tier fp8"]

A failure in one part does not stop the others. Writes check_engine.json; exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from engine.cuda.loading import load_cuda_engine
from engine.cuda.settings import CudaSettings
from engine.interface import Engine, PageAssignment, PrefillChunk, Sampling, SlotStart, StepPlan
from engine.options import EngineOptions
from scripts.gpu.check_tiers import TIERS, tier_errors
from scripts.gpu.make_random_checkpoint import make_random_checkpoint
from tests.cuda_scenarios import (
    FAMILIES,
    SCENARIOS,
    checkpoint,
    decoded_logprobs_are_those_of_the_reference,
    logprobs_are_those_of_the_reference,
    prompt,
)

TOLERANCE = 1.5
"""Error allowed against float32, as a multiple of transformers' own in bf16."""
ALL_ARMS = CudaSettings(tune=False, capture=False)
ONE_ARM = CudaSettings(tune=False, capture=False, decode_widths=(8,), prefill_sizes=(128,))
"""A bucket for everything: what shares a batch must not change a bit then."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="qwen3-1.7b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="the parts whose names begin with one of these"
    )
    parser.add_argument("--skip", default="-", help="leave out the parts whose names begin with this")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {}
    for name, part in _parts(arguments.shape, arguments.layers).items():
        if name.startswith(arguments.skip) or not name.startswith(tuple(arguments.only)):
            continue
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            try:
                outcome: Any = part(Path(folder)) or "passed"
            except Exception:  # noqa: BLE001 - the other parts are to run all the same
                outcome = {"failed": traceback.format_exc()}
        report[name] = outcome
        seconds = time.perf_counter() - began
        print(f"{seconds:6.2f} s  {name}: {outcome['failed'] if _failed(outcome) else outcome}", flush=True)
        (arguments.out / "check_engine.json").write_text(json.dumps(report, indent=1))
    return 1 if any(map(_failed, report.values())) else 0


def _failed(outcome: Any) -> bool:
    return isinstance(outcome, dict) and "failed" in outcome


def _parts(shape: str, layers: int) -> dict[str, Callable[[Path], Any]]:
    engines: list[Engine] = []

    def loader(settings: CudaSettings) -> Callable[[EngineOptions], Engine]:
        def load(options: EngineOptions) -> Engine:
            engines.append(load_cuda_engine(options, None, settings))
            return engines[-1]

        return load

    load, load_one_arm = loader(ALL_ARMS), loader(ONE_ARM)

    def closing(run: Callable[[Path], Any]) -> Callable[[Path], Any]:
        def part(folder: Path) -> Any:
            try:
                return run(folder)
            finally:
                while engines:
                    engines.pop().close()

        return part

    parts: dict[str, Callable[[Path], Any]] = {}
    for family in FAMILIES:
        parts[f"reference {family}"] = closing(
            lambda folder, family=family: logprobs_are_those_of_the_reference(load, folder, family)
        )
    for tier in TIERS:
        parts[f"tier {tier}"] = closing(lambda folder, tier=tier: tier_errors(load, folder, tier))
    parts["decoded, all arms"] = closing(
        lambda folder: decoded_logprobs_are_those_of_the_reference(load, folder)
    )
    for scenario in SCENARIOS:
        parts[scenario.__name__] = closing(lambda folder, scenario=scenario: scenario(load_one_arm, folder))
    for family in FAMILIES:
        parts[f"transformers {family}"] = closing(
            lambda folder, family=family: _against_transformers(load, _tiny(folder, family))
        )
    parts[f"transformers {shape}"] = closing(
        lambda folder: _against_transformers(load, _random(folder, shape, layers))
    )
    return parts


def _tiny(folder: Path, family: str) -> Path:
    return checkpoint(folder, family, layers=4, hidden=256, head_dim=64, heads=8)


def _random(folder: Path, shape: str, layers: int) -> Path:
    make_random_checkpoint(folder, shape, layers=layers)
    return folder


def _against_transformers(load: Callable[[EngineOptions], Engine], folder: Path) -> dict[str, float]:
    """Root mean square of the error of logits against transformers in float32, over the rows of a prompt."""
    tokens = prompt(100)
    engine = load(
        EngineOptions(folder, max_sequences=2, max_step_tokens=128, kv_pages=8, max_sequence_length=256)
    )
    own = np.stack([_logits(engine, tokens[:length]) for length in (1, 17, 64, 65, 99, 100)])
    exact, rounded = (_transformers_logits(folder, tokens, dtype) for dtype in ("float32", "bfloat16"))
    rows = [0, 16, 63, 64, 98, 99]
    errors = {
        "engine": float(np.sqrt(np.mean((own - exact[rows]) ** 2))),
        "transformers_bf16": float(np.sqrt(np.mean((rounded[rows] - exact[rows]) ** 2))),
        "logits": float(np.std(exact[rows])),
    }
    assert errors["engine"] <= TOLERANCE * errors["transformers_bf16"], errors
    return errors


def _logits(engine: Any, tokens: list[int]) -> np.ndarray:
    """Of the last token: from the buffer that sampling reads, once the step is over."""
    array = np.array(tokens, np.int32)
    pages = tuple(PageAssignment(0, index, index) for index in range(-(-len(tokens) // 64)))
    start = SlotStart(0, Sampling(temperature=0.0), array, array[:0])
    plan = StepPlan(0, starts=(start,), pages=pages, prefills=(PrefillChunk(0, array, 0, True),))
    token = engine.execute(plan).result().tokens[0]
    row = engine.peek_logits(0)
    assert token == int(row.argmax())
    return row


def _transformers_logits(folder: Path, tokens: list[int], dtype: str) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager"
    ).to("cuda")
    with torch.no_grad():
        logits = model(torch.tensor([tokens], device="cuda")).logits[0]
    return logits.float().cpu().numpy()


if __name__ == "__main__":
    sys.exit(main())
