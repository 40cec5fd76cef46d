"""Golden logits of the tiny models in family_cases: builds their folders, reads what transformers said."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.config import ModelConfig
from scripts.random_checkpoint import write_random_checkpoint
from tests.parity.family_cases import CASES, PROMPT_LENGTHS, ROPES, VOCAB, Case

GOLDEN = Path(__file__).parent / "golden"

__all__ = [
    "CASES",
    "PROMPT_LENGTHS",
    "ROPES",
    "VOCAB",
    "Case",
    "Expected",
    "build_checkpoint",
    "expected",
    "golden_rope",
    "kept_positions",
    "prompt",
]


@dataclass(frozen=True)
class Expected:
    """What transformers computed in float32 for one prompt."""

    tokens: NDArray[np.int32]
    """int32 [n]."""
    positions: NDArray[np.int32]
    """int32 [m]: rows of the prompt whose logits are kept, the last one among them."""
    logits: NDArray[np.float32]
    """float32 [m, VOCAB]."""


def build_checkpoint(case: Case, folder: Path) -> ModelConfig:
    """Writes the case's model into `folder`, weights in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_random_checkpoint(
        folder,
        case.config,
        seed=case.seed,
        dtype="f32",
        prefix=case.prefix,
        head_name=case.head_name,
        fuse_experts=case.fuse_experts,
        shards=case.shards,
    )


def prompt(length: int) -> NDArray[np.int32]:
    """The tokens of the prompt of that length, int32 [length], the same for all cases."""
    return np.random.Generator(np.random.PCG64(length)).integers(2, VOCAB, length, dtype=np.int32)


def kept_positions(length: int) -> NDArray[np.int32]:
    """Ends, borders of pages and chunks, and a few between, int32 [m]."""
    wanted = (0, 1, 31, 62, 63, 64, 65, 100, 127, 128, 129, 192, length - 1)
    return np.unique(np.asarray([p for p in wanted if p < length], np.int32))


def expected(case: Case, length: int) -> Expected:
    """The golden logits for the prompt of that length."""
    logits = _golden(case.family)[f"{case.name}/{length}"]
    return Expected(prompt(length), kept_positions(length), logits)


def golden_rope(name: str) -> tuple[NDArray[np.float32], float]:
    """(frequencies float32 [rotary_dim / 2], factor on cos and sin) of one of ROPES."""
    golden = _golden("rope")
    return golden[name], float(golden[f"{name}/factor"])


@cache
def _golden(family: str) -> dict[str, NDArray[np.float32]]:
    with np.load(GOLDEN / f"{family}.npz") as file:
        return {name: file[name] for name in file.files}
