"""What must hold of a CUDA engine, whatever carries out its launches: for the tests with and without a GPU.

Each scenario takes a loader of engines and an empty folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint import open_checkpoint
from engine.interface import Engine, EngineError, Sampling, StepPlan, TokenLogprobs
from engine.options import EngineOptions
from engine.reference import ReferenceEngine
from scripts.make_tiny_checkpoint import make_tiny_checkpoint
from tests.parity.families import CASES, Case, build_checkpoint
from tests.parity.reference_driver import Driver

VOCAB = 320
DENSE_FAMILIES = ("llama", "mistral", "mistral3", "qwen2", "qwen2_5_vl", "qwen3", "smollm3")
Load = Callable[[EngineOptions], Engine]


def options(folder: Path, **changes: Any) -> EngineOptions:
    chosen: dict[str, Any] = {
        "max_sequences": 5,
        "max_step_tokens": 96,
        "kv_pages": 24,
        "max_sequence_length": 320,
    }
    return EngineOptions(model=folder, **(chosen | changes))


def checkpoint(folder: Path, family: str = "qwen3", **sizes: Any) -> Path:
    chosen = {"vocab_size": VOCAB, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 64}
    return make_tiny_checkpoint(folder, family=family, **(chosen | sizes))


def reference(folder: Path, **changes: Any) -> Driver:
    with open_checkpoint(folder) as opened:
        return Driver(ReferenceEngine(opened, options(folder, threads=1, **changes)))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng((seed, length)).integers(3, VOCAB, length).tolist()


def assert_close(found: list[TokenLogprobs], wanted: list[TokenLogprobs]) -> None:
    """bf16 against float32: log-probabilities near each other in the mean and everywhere."""
    differences: list[float] = []
    for one, other in zip(found, wanted, strict=True):
        assert len(one.top_ids) == len(other.top_ids)
        differences.append(one.logprob - other.logprob)
        differences += np.subtract(one.top_logprobs, other.top_logprobs).tolist()
    assert len(found) == len(wanted)
    errors = np.abs([0.0, *differences])
    assert np.sqrt(np.mean(errors**2)) < 0.12
    assert errors.max() < 0.5


def logprobs_are_those_of_the_reference(load: Load, folder: Path, family: str = "qwen3") -> None:
    checkpoint(folder, family)
    sampling = Sampling(temperature=0.0, logprobs=3, prompt_logprobs=2)
    wanted, found = reference(folder), Driver(load(options(folder)))
    for driver in (wanted, found):
        for slot, length in ((3, 70), (0, 1), (4, 23)):
            driver.start(slot, prompt(length), sampling)
        driver.prefill(3, 0, 4, chunk=29)
    for slot in (3, 0, 4):
        assert_close(found.prompt_logprobs[slot], wanted.prompt_logprobs[slot])
        assert_close(found.logprobs[slot], wanted.logprobs[slot])


def decoded_logprobs_are_those_of_the_reference(load: Load, folder: Path) -> None:
    """The reference is made to follow the engine's own tokens."""
    checkpoint(folder, "llama", heads=8, kv_heads=1, layers=3)
    driver = Driver(load(options(folder)))
    driver.start(2, prompt(61), Sampling(temperature=0.0, logprobs=20))
    driver.prefill(2)
    driver.decode(9, 2)
    forced = reference(folder)
    tokens = [*prompt(61), *driver.tokens[2]]
    forced.start(0, tokens, Sampling(temperature=0.0, prompt_logprobs=20))
    forced.prefill(0)
    assert_close(driver.logprobs[2], forced.prompt_logprobs[0][60:])


def tokens_do_not_depend_on_chunks_company_or_shared_pages(load: Load, folder: Path) -> None:
    checkpoint(folder)
    alone = Driver(load(options(folder)))
    alone.start(1, prompt(150))
    alone.prefill(1, chunk=96)
    alone.decode(6)
    crowd = Driver(load(options(folder)))
    crowd.start(0, prompt(40, seed=1))
    crowd.start(2, prompt(150))
    crowd.prefill(0, 2, chunk=40)
    crowd.decode(6)
    assert crowd.tokens[2] == alone.tokens[1]
    crowd.start(3, prompt(150), shared=crowd.pages[2][:2])
    crowd.prefill(3)
    crowd.decode(6, 3)
    assert crowd.tokens[3] == alone.tokens[1]


def a_resumed_sequence_goes_on_with_the_same_tokens(load: Load, folder: Path) -> None:
    """Biases and a high temperature keep the draws away from what recomputed keys round differently."""
    few = dict.fromkeys(range(20, 28), 1000.0)
    sampling = Sampling(
        temperature=10.0, seed=11, frequency_penalty=5.0, presence_penalty=3.0, logit_bias=few
    )
    driver = Driver(load(options(checkpoint(folder))))
    driver.start(0, prompt(30), sampling)
    driver.prefill(0)
    driver.decode(8, 0)
    first = list(driver.tokens[0])
    driver.start(2, prompt(30), sampling, output=first[:4])
    driver.prefill(2, chunk=11)
    driver.decode(4, 2)
    assert first[:4] + driver.tokens[2] == first


def a_stop_is_decided_on_the_device(load: Load, folder: Path) -> None:
    """Steps are enqueued ahead of their results: rows behind the stop yield nothing."""
    engine = load(options(checkpoint(folder)))
    probe = Driver(engine)
    probe.start(0, prompt(20))
    probe.prefill(0)
    probe.decode(5)
    stop = probe.tokens[0][2]
    expected = probe.tokens[0][: probe.tokens[0].index(stop) + 1]
    driver = Driver(load(options(folder)))
    driver.start(1, prompt(20), Sampling(temperature=0.0, stop_token_ids=frozenset({stop, 10**6})))
    driver.prefill(1)
    handles = [driver.engine.execute(StepPlan(100 + index, decodes=(1,))) for index in range(6)]
    results = [handle.result() for handle in handles]
    assert driver.tokens[1] + [token for result in results for token in result.tokens] == expected
    assert [driver.stopped[1], *(flag for result in results for flag in result.stopped)].count(True) == 1


def steps_collected_late_keep_their_own_results(load: Load, folder: Path) -> None:
    checkpoint(folder)
    prompt_driver = Driver(load(options(folder)))
    prompt_driver.start(0, prompt(20))
    prompt_driver.prefill(0)
    prompt_driver.decode(12)
    late = Driver(load(options(folder)))
    late.start(0, prompt(20))
    late.prefill(0)
    handles = [late.engine.execute(StepPlan(50 + i, decodes=(0,))) for i in range(12)]
    assert [handle.result().tokens[0] for handle in handles] == prompt_driver.tokens[0][1:]
    assert all(handle.is_done() for handle in handles)


def a_sequence_without_a_choice_fails_alone(load: Load, folder: Path) -> None:
    driver = Driver(load(options(checkpoint(folder))))
    nothing = Sampling(temperature=0.0, logit_bias={token: float("-inf") for token in range(VOCAB)})
    driver.start(0, prompt(9), nothing)
    driver.start(1, prompt(9))
    driver.prefill(0, 1)
    assert list(driver.faults) == [0]
    driver.decode(3, 0, 1)
    assert driver.tokens[0] == []
    assert len(driver.tokens[1]) == 4


def sampling_settings_reach_the_device(load: Load, folder: Path) -> None:
    """Biases so strong that rounding cannot matter decide."""
    driver = Driver(load(options(checkpoint(folder))))
    settings = [
        Sampling(temperature=0.0, logit_bias={7: 1e4}),
        Sampling(temperature=1.0, top_k=1, logit_bias={8: 1e4}, seed=3),
        Sampling(temperature=0.0, logit_bias={9: 1e4, 10: 9e3}, stop_token_ids=frozenset({9}), min_tokens=2),
        Sampling(temperature=0.0, logit_bias={5: 1000.0, 6: 950.0}, presence_penalty=100.0),
    ]
    for slot, sampling in enumerate(settings):
        driver.start(slot, prompt(5 + slot), sampling)
    driver.prefill(*range(4))
    driver.decode(2, *range(4))
    assert [driver.tokens[slot] for slot in range(4)] == [[7] * 3, [8] * 3, [10, 10, 9], [5, 6, 5]]


def broken_plans_are_refused_before_anything_changes(load: Load, folder: Path) -> None:
    driver = Driver(load(options(checkpoint(folder))))
    driver.start(0, prompt(20))
    driver.prefill(0)
    driver.decode(2)
    for plan, message in (
        (StepPlan(7, decodes=(1,)), "slot 1: no sequence has been started"),
        (StepPlan(7, decodes=(0, 0)), "slot 0 stands in two rows"),
        (StepPlan(7, decodes=(99,)), "is not in 0 … 4"),
        (StepPlan(7, releases=(0,), decodes=(0,)), "slot 0: no sequence has been started"),
    ):
        with pytest.raises(ValueError, match=f"step 7: .*{message}"):
            driver.engine.execute(plan)
    driver.decode(1)
    assert len(driver.tokens[0]) == 4


def a_closed_engine_says_so(load: Load, folder: Path) -> None:
    engine = load(options(checkpoint(folder)))
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.execute(StepPlan(0))


SCENARIOS = (
    decoded_logprobs_are_those_of_the_reference,
    tokens_do_not_depend_on_chunks_company_or_shared_pages,
    a_resumed_sequence_goes_on_with_the_same_tokens,
    a_stop_is_decided_on_the_device,
    steps_collected_late_keep_their_own_results,
    a_sequence_without_a_choice_fails_alone,
    sampling_settings_reach_the_device,
    broken_plans_are_refused_before_anything_changes,
    a_closed_engine_says_so,
)
FAMILIES = ("qwen3", "qwen2", "llama", "mistral")


def family_cases() -> list[Case]:
    """The tiny models of all dense families, with heads of a size that the kernels have."""
    cases = []
    for case in CASES:
        text = case.config.get("text_config", case.config)
        if text.get("head_dim", 0) >= 32 and case.family in DENSE_FAMILIES:
            resized = text | {"head_dim": 64}
            nested = "text_config" in case.config
            cases.append(
                replace(case, config=case.config | ({"text_config": resized} if nested else resized))
            )
    return cases


def a_family_has_the_logprobs_of_the_reference(load: Load, folder: Path, case: Case) -> None:
    """Windows, partial rotation, layers without rotation, biases: prompts over pages, then decoding."""
    config = build_checkpoint(case, folder)
    wanted = reference(folder, max_sequence_length=256)
    found = Driver(load(options(folder, max_sequence_length=256)))
    tokens = np.random.default_rng(case.seed).integers(2, config.vocab_size, 130).tolist()
    found.start(1, tokens, Sampling(temperature=0.0, logprobs=4, prompt_logprobs=4))
    found.prefill(1, chunk=70)
    found.decode(5, 1)
    wanted.start(1, [*tokens, *found.tokens[1]], Sampling(temperature=0.0, prompt_logprobs=4))
    wanted.prefill(1, chunk=90)
    assert_close([*found.prompt_logprobs[1], *found.logprobs[1]], wanted.prompt_logprobs[1])
