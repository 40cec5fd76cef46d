"""The CUDA engine's log-probabilities in each tier against the reference engine's, which rounds alike.

Both differ by bf16's rounding of activations alone; but FP8 makes more of it, where a value next to an edge
of e4m3 falls to the other side, a sixteenth away. Knows checkpoints and the engine's interface.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine.checkpoint import open_checkpoint
from engine.interface import Engine, Sampling, TokenLogprobs
from engine.options import EngineOptions, KvDtype, Precision
from engine.reference import ReferenceEngine
from kernels.skinny import WeightKind
from tests.cuda_scenarios import checkpoint, options, prompt
from tests.parity.reference_driver import Driver

ROWS = (1, 8, 16, 64)
"""Decode steps of so many rows: each arm of the products, and its neighbours."""
ALTERNATIVES = 20
STEPS = 24
TIERS = {
    "bf16": (Precision.BF16, KvDtype.BF16),
    "q4": (Precision.Q4, KvDtype.BF16),
    "fp8": (Precision.FP8, KvDtype.BF16),
    "fp8, KV fp8": (Precision.FP8, KvDtype.FP8),
    "bf16, KV fp8": (Precision.BF16, KvDtype.FP8),
}
BOUNDS = {"bf16": 0.02, "q4": 0.02, "fp8": 0.12, "fp8, KV fp8": 0.13, "bf16, KV fp8": 0.05}
"""Root mean square of the errors, nats, of log-probabilities whose spread is about one. On the host twin at
most 0.010, 0.009, 0.084, 0.093 and 0.032."""

Load = Callable[[EngineOptions], Engine]


def tier_errors(load: Load, folder: Path, tier: str, family: str = "qwen3") -> dict[str, float]:
    """Root mean square errors by kind of row: "prefill", "decode ×1" and so on; and, to compare, what the
    tier itself does to a prompt on the reference engine. Raises AssertionError beyond BOUNDS."""
    checkpoint(folder, family, layers=4, hidden=256, heads=8, vocab_size=320)
    precision, kv = TIERS[tier]
    chosen = options(
        folder, precision=precision, kv_dtype=kv, threads=1, max_sequences=max(ROWS), max_step_tokens=256,
        kv_pages=200, max_sequence_length=192,
    )  # fmt: skip
    engine = load(chosen)
    errors = {"prefill": _prefill_error(engine, chosen)}
    for rows in ROWS:
        errors[f"decode ×{rows}"] = _decode_error(engine, chosen, rows)
    assert max(errors.values()) <= BOUNDS[tier], (tier, errors)
    exact = _reference(replace(chosen, precision=Precision.BF16, kv_dtype=KvDtype.BF16), rounds_rows=False)
    return errors | {"the tier itself": _between(_reference(chosen, rounds_rows=True), exact)}


def _prefill_error(engine: Engine, chosen: EngineOptions) -> float:
    driver = Driver(engine)
    error = _between(driver, _reference(chosen, rounds_rows=True))
    driver.step(releases=(0, 1))
    return error


def _between(found: Driver, wanted: Driver) -> float:
    """Over prompts of 150 and 70 tokens side by side, in chunks."""
    sampling = Sampling(temperature=0.0, prompt_logprobs=ALTERNATIVES)
    for driver in (found, wanted):
        for slot, length in ((0, 150), (1, 70)):
            driver.start(slot, prompt(length), sampling)
        driver.prefill(0, 1, chunk=64)
    return _root_mean_square(
        [_errors(found.prompt_logprobs[slot], wanted.prompt_logprobs[slot]) for slot in (0, 1)]
    )


def _decode_error(engine: Engine, chosen: EngineOptions, rows: int) -> float:
    """Sequences of next to no prompt, so that all keys come from decode steps of so many rows; the reference
    is made to follow some."""
    driver = Driver(engine)
    sampling = Sampling(temperature=0.0, logprobs=ALTERNATIVES)
    for slot in range(rows):
        driver.start(slot, prompt(2, seed=slot), sampling)
    driver.prefill(*range(rows))
    driver.decode(STEPS, *range(rows))
    errors = []
    for slot in sorted({0, rows // 2, rows - 1}):
        forced = _reference(chosen, rounds_rows=rows > WeightKind.FP8.max_rows)
        tokens = [*prompt(2, seed=slot), *driver.tokens[slot]]
        forced.start(0, tokens, Sampling(temperature=0.0, prompt_logprobs=ALTERNATIVES))
        forced.prefill(0)
        errors.append(_errors(driver.logprobs[slot], forced.prompt_logprobs[0][1:]))
    driver.step(releases=range(rows))
    return _root_mean_square(errors)


def _reference(chosen: EngineOptions, *, rounds_rows: bool) -> Driver:
    sizes = replace(chosen, max_sequences=2, kv_pages=8)
    with open_checkpoint(chosen.model) as opened:
        is_fp8 = chosen.precision is Precision.FP8
        return Driver(ReferenceEngine(opened, sizes, fp8_activations=is_fp8 and rounds_rows))


def _errors(found: list[TokenLogprobs], wanted: list[TokenLogprobs]) -> np.ndarray:
    """Of the tokens that both name, at every position."""
    assert len(found) == len(wanted)
    errors = []
    for one, other in zip(found, wanted, strict=True):
        known = dict(zip(other.top_ids, other.top_logprobs, strict=True))
        pairs = zip(one.top_ids, one.top_logprobs, strict=True)
        errors += [value - known[token] for token, value in pairs if token in known]
        errors.append(one.logprob - other.logprob)
    assert len(errors) > len(found) * ALTERNATIVES // 2, "the likeliest tokens are not the same"
    return np.array(errors)


def _root_mean_square(errors: list[np.ndarray]) -> float:
    return round(float(np.sqrt(np.mean(np.concatenate(errors) ** 2))), 5)
