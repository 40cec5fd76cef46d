"""What Slipstream must reach on one H200, by model shape, tier and figure. Knows no measurement."""

from __future__ import annotations

from dataclasses import replace

from scripts.benchmark.figures import Figure
from scripts.benchmark.gpu_bounds import Tier

Reach = dict[str, float]
"""By precision: with the KV cache in bf16."""

_SMALL, _LARGE, _LLAMA = "qwen3-1.7b", "qwen3-8b", "llama-3.1-8b"
_GOALS: dict[tuple[str, str], Reach] = {
    (_SMALL, "decode ×1"): {"bf16": 800, "q4": 1_500},
    (_LARGE, "decode ×1"): {"bf16": 215},
    (_LLAMA, "decode ×1"): {"q4": 500},
    (_SMALL, "decode ×8"): {"bf16": 5_500},
    (_LARGE, "decode ×8"): {"bf16": 1_600},
    (_SMALL, "decode ×64"): {"bf16": 25_000, "fp8": 30_000, "q4": 20_000},
    (_LARGE, "decode ×64"): {"bf16": 10_500, "fp8": 15_000, "q4": 10_000},
    (_SMALL, "prefill 8 × 2,048"): {"bf16": 170_000, "fp8": 230_000},
    (_LARGE, "prefill 8 × 2,048"): {"bf16": 40_000, "fp8": 62_000},
    (_SMALL, "first token of 2,048"): {"bf16": 14},
    (_LARGE, "first token of 2,048"): {"bf16": 48},
    (_LARGE, "start to ready"): {"bf16": 10},
}
_IDLE_PERCENT = 2.0
"""Of the time between decode steps under load."""


def goal(figure: Figure, model: str, tier: Tier, name: str) -> Figure:
    """The figure with what it must reach, if anything. name: the figure's, without model and tier."""
    if name.startswith("idle between steps"):
        return replace(figure, at_most=_IDLE_PERCENT)
    must = None
    if tier.kv_dtype == "bf16":
        must = _GOALS.get((model, name), {}).get(tier.precision)
    if must is None:
        return figure
    return replace(figure, at_most=must) if figure.unit in ("ms", "s") else replace(figure, at_least=must)
