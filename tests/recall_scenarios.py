"""What must hold exactly of any engine, on the model of scripts/gpu/recall_model.py: every token is foretold.

Each scenario takes a loader of engines and an empty folder. Knows no engine, but the reference's sampler: it
draws from the model's foretold logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.interface import Engine, Sampling
from engine.options import EngineOptions, KvDtype, Precision
from engine.reference.sampler import Sampler
from scripts.gpu.recall_model import BOS, TINY, Recall, make_recall_model
from tests.parity.reference_driver import Driver

Load = Callable[[EngineOptions], Engine]
GREEDY = Sampling(temperature=0.0)
WAYS = (
    GREEDY,
    Sampling(temperature=1.0, top_k=8, seed=3),
    Sampling(temperature=0.7, top_k=8, top_p=0.9, seed=2**63 + 5),
    Sampling(temperature=1.3, top_k=8, min_p=0.02, seed=5, logprobs=3),
    Sampling(temperature=1.0, top_k=8, frequency_penalty=0.1, repetition_penalty=1.02, seed=7),
    Sampling(temperature=0.9, top_p=0.8, seed=11),
    Sampling(temperature=1.5, presence_penalty=0.5, logit_bias={7: 3.0, 9: -2.0}, seed=13),
    Sampling(temperature=0.0, frequency_penalty=0.3, repetition_penalty=1.1),
)
"""Every rule of sampling, alone and together, all from one model."""

TIERS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "q4": {"precision": Precision.Q4},
    "fp8": {"precision": Precision.FP8},
    "fp8, KV fp8": {"precision": Precision.FP8, "kv_dtype": KvDtype.FP8},
}
"""In none of which anything rounds."""


def options(folder: Path, **changes: Any) -> EngineOptions:
    chosen: dict[str, Any] = {
        "max_sequences": len(WAYS) + 1,
        "max_step_tokens": 256,
        "kv_pages": 80,
        "max_sequence_length": 320,
    }
    return EngineOptions(model=folder, **(chosen | changes))


def prompt(length: int, seed: int = 0) -> list[int]:
    """BOS and random tokens."""
    random = np.random.default_rng((seed, length))
    return [BOS, *random.integers(3, TINY["vocab_size"], length - 1).tolist()]


def foretold(model: Recall, tokens: Sequence[int], sampling: Sampling, count: int) -> list[int]:
    """What a sequence must go on with."""
    codes = model.codes()
    sampler = Sampler(sampling, np.array(tokens, np.int32), np.zeros(0, np.int32), model.vocab)
    answer: list[int] = []
    for _ in range(count):
        answer.append(sampler.next(model.logits([*tokens, *answer], codes))[0])
    return answer


def tokens_are_foretold_for_every_way_of_sampling(load: Load, folder: Path, **changes: Any) -> None:
    """All ways side by side, prompts in chunks, rows of many lengths; then each alone."""
    model = make_recall_model(folder, TINY)
    lengths = (2, 3, 64, 65, 66, 129, 31, 150)
    wanted = [foretold(model, prompt(n), way, 24) for n, way in zip(lengths, WAYS, strict=True)]
    crowd = Driver(load(options(folder, **changes)))
    for slot, (length, way) in enumerate(zip(lengths, WAYS, strict=True)):
        crowd.start(slot, prompt(length), way)
    crowd.prefill(*range(len(WAYS)), chunk=27)
    crowd.decode(23)
    assert [crowd.tokens[slot] for slot in range(len(WAYS))] == wanted
    alone = Driver(load(options(folder, **changes)))
    for length, way, answer in zip(lengths, WAYS, wanted, strict=True):
        alone.start(len(WAYS), prompt(length), way)
        alone.prefill(len(WAYS))
        alone.decode(23, len(WAYS))
        assert alone.tokens[len(WAYS)] == answer
        alone.step(releases=[len(WAYS)])


def a_resumed_or_shared_sequence_goes_on_as_foretold(load: Load, folder: Path, **changes: Any) -> None:
    """Preempted in the middle of its output, its keys made anew by prefill; a prefix in another's pages."""
    model = make_recall_model(folder, TINY)
    text = prompt(140)
    for slot, way in enumerate(WAYS):
        other = len(WAYS) if slot < 4 else slot - 4
        answer = foretold(model, text, way, 20)
        driver = Driver(load(options(folder, **changes)))
        driver.start(slot, text, way)
        driver.prefill(slot)
        driver.decode(8, slot)
        driver.start(other, text, way, output=answer[:9], shared=driver.pages[slot][:2])
        driver.prefill(other, chunk=11)
        driver.decode(10, other)
        assert [*driver.tokens[slot], *driver.tokens[other]] == answer


def slots_and_pages_of_the_gone_leave_no_trace(load: Load, folder: Path, **changes: Any) -> None:
    """Sequences of every length take over slots and pages of others, again and again."""
    model = make_recall_model(folder, TINY)
    driver = Driver(load(options(folder, kv_pages=400, **changes)))
    for turn in range(4):
        lengths = [2 + (turn * 37 + slot * 29) % 180 for slot in range(len(WAYS))]
        ways = [WAYS[(slot + turn) % len(WAYS)] for slot in range(len(WAYS))]
        for slot, (length, way) in enumerate(zip(lengths, ways, strict=True)):
            driver.start(slot, prompt(length, turn), way)
        driver.prefill(*range(len(WAYS)), chunk=32)
        driver.decode(5, *range(len(WAYS)))
        for slot, (length, way) in enumerate(zip(lengths, ways, strict=True)):
            assert driver.tokens[slot] == foretold(model, prompt(length, turn), way, 6)
        driver.step(releases=range(len(WAYS)))


SCENARIOS = (
    tokens_are_foretold_for_every_way_of_sampling,
    a_resumed_or_shared_sequence_goes_on_as_foretold,
    slots_and_pages_of_the_gone_leave_no_trace,
)
