"""What a precision costs: the demo model's perplexity on a fixed English text, by engine and precision.

    PYTHONPATH=. python scripts/gpu/perplexity.py --model FILE.gguf --engines reference --out benchmarks \
        --name perplexity-reference
    PYTHONPATH=. python scripts/gpu/perplexity.py --model-parts parts/smollm2.* --engines cuda \
        --out build/check --reference benchmarks/perplexity-reference.json

The text (scripts/data/canal.txt) is cut into windows of 512 tokens, each predicted from its own beginning.
Fails (exit code 1) if FP8 is more than 3% above the same engine's bf16, or if one of CUDA's tiers is more
than 1% off the reference engine's, which rounds as that tier does: weights, cached keys and values, and for
FP8 the rows that are multiplied. --reference takes its figures from a file: it needs no GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint import open_checkpoint
from engine.factory import load_engine
from engine.interface import Engine, Sampling, pages_for
from engine.options import EngineOptions, KvDtype, Precision
from engine.reference import ReferenceEngine
from scripts.gpu.check_smollm2 import ROOT, join
from service.text.loading import load_tokenizer
from tests.parity.reference_driver import Driver

TEXT = ROOT / "scripts" / "data" / "canal.txt"
WINDOW = 512
FP8_LIMIT = 1.03
"""Of FP8 over bf16 on one engine."""
AGREEMENT = 0.01
"""Between CUDA and the reference engine in one precision."""
TIERS = (("bf16", "auto"), ("q4", "auto"), ("fp8", "auto"), ("fp8", "fp8"))
"""Of weights and of the KV cache."""


@dataclass(frozen=True, slots=True)
class Row:
    """One engine in one precision."""

    engine: str
    precision: str
    kv_dtype: str
    perplexity: float
    seconds: float
    fallbacks: tuple[str, ...] = ()

    @property
    def tier(self) -> tuple[str, str]:
        return self.precision, self.kv_dtype


def windows(tokens: Sequence[int], size: int) -> list[list[int]]:
    """All of the text but a rest too short to say much."""
    parts = [list(tokens[first : first + size]) for first in range(0, len(tokens), size)]
    return [part for part in parts if len(part) >= size // 4]


def perplexity(engine: Engine, parts: Sequence[Sequence[int]]) -> float:
    """exp of the mean negative log-probability of every token but each window's first."""
    total, count = 0.0, 0
    for part in parts:
        driver = Driver(engine)
        driver.start(0, part, Sampling(temperature=0.0, prompt_logprobs=0))
        driver.prefill(0)
        driver.step(releases=[0])
        entries = driver.prompt_logprobs[0]
        assert len(entries) == len(part) - 1
        total -= sum(entry.logprob for entry in entries)
        count += len(entries)
    return math.exp(total / count)


def measure(model: Path, engine: str, tier: tuple[str, str], parts: Sequence[Sequence[int]]) -> Row:
    """Raises ModelError for a tier that the engine has not."""
    began = time.perf_counter()
    longest = max(map(len, parts)) + 1
    options = EngineOptions(
        model, engine=engine, precision=Precision(tier[0]), kv_dtype=KvDtype(tier[1]), max_sequences=1,
        max_step_tokens=WINDOW, max_sequence_length=longest, kv_pages=pages_for(longest),
    )  # fmt: skip
    with closing(_load(options)) as loaded:
        value = perplexity(loaded, parts)
        return Row(engine, *tier, value, round(time.perf_counter() - began, 2), loaded.info.fallbacks)


def _load(options: EngineOptions) -> Engine:
    """The reference engine rounds FP8's rows too, as CUDA does wherever a pass has several."""
    if options.engine != "reference":
        return load_engine(options)
    with open_checkpoint(options.model) as checkpoint:
        return ReferenceEngine(checkpoint, options, fp8_activations=options.precision is Precision.FP8)


def faults(rows: Sequence[Row]) -> list[str]:
    """What is worse than it may be."""
    by_name = {(row.engine, *row.tier): row.perplexity for row in rows}
    found = []
    for row in rows:
        base = by_name.get((row.engine, "bf16", "auto"))
        if row.precision == "fp8" and base is not None and row.perplexity > FP8_LIMIT * base:
            found.append(f"{_name(row)}: {100 * (row.perplexity / base - 1):.2f}% above bf16")
        exact = by_name.get(("reference", *row.tier))
        if row.engine == "cuda" and exact is not None and abs(row.perplexity / exact - 1) > AGREEMENT:
            found.append(f"{_name(row)}: {100 * (row.perplexity / exact - 1):+.2f}% off the reference engine")
    return found


def _name(row: Row) -> str:
    return f"{row.engine} {row.precision}" + ("" if row.kv_dtype == "auto" else f", KV {row.kv_dtype}")


def as_table(rows: Sequence[Row], wrong: Sequence[str]) -> str:
    """Markdown."""
    by_name = {(row.engine, *row.tier): row.perplexity for row in rows}
    lines = [
        "| engine, precision | perplexity | against its bf16 | against the reference engine | s |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = [_name(row), f"{row.perplexity:.4f}"]
        for other in ((row.engine, "bf16", "auto"), ("reference", *row.tier)):
            base = by_name.get(other)
            cells.append("" if base is None else f"{100 * (row.perplexity / base - 1):+.2f}%")
        lines.append(f"| {' | '.join(cells)} | {row.seconds:.1f} |")
    return "\n".join([*lines, *(f"**{fault}**" for fault in wrong)]) + "\n"


def main() -> int:
    options = _options()
    with ExitStack() as stack:
        model = options.model or join(options.model_parts, stack)
        tokens = load_tokenizer(model).encode(TEXT.read_text())
        parts = windows(tokens, WINDOW)
        what = {"tokens": len(tokens), "window": WINDOW, "sha256": _digest(parts)}
        rows = _recorded(options.reference, what)
        for engine in options.engines:
            for tier in TIERS:
                if ":".join(tier) not in options.tiers:
                    continue
                rows.append(measure(model, engine, tier, parts))
                print(f"{_name(rows[-1])}: {rows[-1].perplexity:.4f}", file=sys.stderr, flush=True)
    wrong = faults(rows)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        document = {"text": what, "rows": [asdict(row) for row in rows], "faults": wrong}
        (options.out / f"{options.name}.json").write_text(json.dumps(document, indent=1) + "\n")
        heading = (
            f"# Perplexity by precision\n\n{len(tokens):,} tokens of `{TEXT.relative_to(ROOT)}` in windows"
        )
        page = f"{heading} of {WINDOW}, SmolLM2-135M-Instruct.\n\n{as_table(rows, wrong)}"
        (options.out / f"{options.name}.md").write_text(page)
    print(as_table(rows, wrong))
    return 1 if wrong else 0


def _digest(parts: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _recorded(path: Path | None, what: dict[str, Any]) -> list[Row]:
    """The rows of an earlier run. Raises ValueError if it was of another text or tokenizer."""
    if path is None:
        return []
    document = json.loads(path.read_text())
    if document["text"] != what:
        raise ValueError(f"{path} is of another text: {document['text']}, not {what}")
    return [Row(**row | {"fallbacks": tuple(row["fallbacks"])}) for row in document["rows"]]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path)
    source.add_argument("--model-parts", type=Path, nargs="+", help="joined in the order of their names")
    parser.add_argument("--engines", nargs="+", default=["reference", "cuda"], choices=["reference", "cuda"])
    names = [":".join(tier) for tier in TIERS]
    parser.add_argument("--tiers", nargs="+", default=names, choices=names, help="weights:KV cache")
    parser.add_argument("--reference", type=Path, help="JSON of a run on the reference engine")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--name", default="perplexity")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
