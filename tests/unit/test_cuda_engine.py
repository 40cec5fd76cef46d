"""The CUDA engine's own code against the reference engine; numpy carries out its kernels on host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")
pytest.importorskip("nvmath")

from engine.cuda import loading, staging
from engine.cuda.settings import SUITED_SIZES
from engine.interface import Sampling
from engine.options import EngineOptions, Precision
from kernels import skinny_rows
from scripts.tiny_gguf import write_gguf
from tests.cuda_scenarios import (
    FAMILIES,
    SCENARIOS,
    VOCAB,
    Load,
    a_family_has_the_logprobs_of_the_reference,
    assert_close,
    checkpoint,
    decoded_logprobs_are_those_of_the_reference,
    family_cases,
    logprobs_are_those_of_the_reference,
    options,
    prompt,
    reference,
)
from tests.parity.families import Case
from tests.parity.reference_driver import Driver
from tests.unit.cuda_twin import SETTINGS, HostLibrary, load_twin
from tests.weight_tiers import GGUF_CONFIG, publish_fp8

__all__ = ["load_twin"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_the_reference(tmp_path: Path, load_twin: Load, family: str) -> None:
    logprobs_are_those_of_the_reference(load_twin, tmp_path, family)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(tmp_path: Path, load_twin: Load, scenario: object) -> None:
    scenario(load_twin, tmp_path)  # type: ignore[operator]


def test_several_rows_are_streamed(tmp_path: Path, load_twin: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where weights are large enough, which here all are."""
    monkeypatch.setattr(skinny_rows, "LEAST_BYTES", 0)
    HostLibrary.names.clear()
    decoded_logprobs_are_those_of_the_reference(load_twin, tmp_path)
    names = {name.partition(",")[0] for name in HostLibrary.names if name.startswith("skinny_rows")}
    assert names == {f"skinny_rows<{finish}" for finish in range(3)}


@pytest.mark.parametrize("case", family_cases(), ids=lambda case: case.id)
def test_a_family_has_the_logprobs_of_the_reference(tmp_path: Path, load_twin: Load, case: Case) -> None:
    a_family_has_the_logprobs_of_the_reference(load_twin, tmp_path, case)


@pytest.mark.parametrize(
    ("write", "tier", "notes"),
    [
        (
            lambda folder: publish_fp8(folder, "row", head_dim=64, vocab_size=VOCAB),
            "fp8",
            ["head is kept in bf16"],
        ),
        (lambda folder: publish_fp8(folder, "tensor", head_dim=64), "fp8", ["head is kept in bf16"]),
        (
            lambda folder: publish_fp8(folder, "block", head_dim=64),
            "bf16",
            ["f8_e4m3 were converted to bf16"],
        ),
        (
            lambda folder: write_gguf(folder / "q4.gguf", GGUF_CONFIG, quant="Q4_0"),
            "q4",
            ["f32 were converted to bf16"],
        ),
    ],
    ids=["fp8-row", "fp8-tensor", "fp8-block", "gguf-q4_0"],
)
def test_auto_runs_what_the_files_have(
    tmp_path: Path, load_twin: Load, write: Callable[[Path], Path], tier: str, notes: list[str]
) -> None:
    """And gets what the reference engine gets from the file's own values, but for the head of Q4_0."""
    model = write(tmp_path)
    engine = load_twin(options(model))
    assert (engine.info.weight_dtype, engine.info.kv_dtype) == (tier, "bf16")
    for note in notes:
        assert any(note in said for said in engine.info.fallbacks)
    assert not any("anew" in said for said in engine.info.fallbacks)
    wanted, found = reference(model), Driver(engine)
    for driver in (wanted, found):
        driver.start(1, prompt(40), Sampling(temperature=0.0, prompt_logprobs=2))
        driver.prefill(1)
    assert_close(found.prompt_logprobs[1], wanted.prompt_logprobs[1])


@pytest.mark.parametrize("slots", [1, 3, 70])
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.Q4, Precision.FP8])
def test_every_product_is_tuned_before_serving(
    tmp_path: Path, load_twin: Load, slots: int, precision: Precision
) -> None:
    """None is left to the heuristic's first choice, whatever steps come."""
    sizes = {"max_sequences": slots, "max_step_tokens": 90, "kv_pages": 90, "max_sequence_length": 192}
    engine = load_twin(
        options(checkpoint(tmp_path), precision=precision, **sizes), replace(SETTINGS, tune=True)
    )
    driver = Driver(engine)
    for slot in range(slots):
        driver.start(slot, prompt(20, seed=slot), Sampling(temperature=0.0, prompt_logprobs=1))
    for slot in range(0, slots, 4):
        driver.prefill(*range(slot, min(slots, slot + 4)))
    driver.decode(2)
    assert not driver.faults, "tuning has left something in memory that is read"
    planner = engine.parts.planner
    assert planner.keys or precision is Precision.Q4  # whose steps of so few rows leave nothing to cuBLASLt
    assert planner.keys <= planner.tuned


def test_the_smallest_engine(tmp_path: Path, load_twin: Load) -> None:
    """One slot, steps of few tokens, a prompt over many of them, its log-probabilities in many groups."""
    checkpoint(tmp_path)
    sampling = Sampling(temperature=0.0, logprobs=0, prompt_logprobs=0)
    sizes = {"max_sequences": 1, "max_step_tokens": 7, "kv_pages": 2, "max_sequence_length": 128}
    wanted = reference(tmp_path, **sizes)
    found = Driver(load_twin(options(tmp_path, **sizes)))
    for driver in (wanted, found):
        driver.start(0, prompt(50), sampling)
        driver.prefill(0, chunk=7)
    assert_close(found.prompt_logprobs[0], wanted.prompt_logprobs[0])
    assert len(found.prompt_logprobs[0]) == 49
    found.decode(10, 0)
    assert len(found.tokens[0]) == 11


def test_sizes_that_suit_the_engine(tmp_path: Path, load_twin: Load) -> None:
    suited = SUITED_SIZES
    engine = load_twin(EngineOptions(checkpoint(tmp_path), kv_pages=64), replace(SETTINGS, capture=False))  # type: ignore[call-arg]
    capacity = engine.capacity
    assert (capacity.slots, capacity.max_step_tokens) == (suited.max_sequences, suited.max_step_tokens)
    assert capacity.prefill_tokens_beside_decodes == suited.prefill_tokens_beside_decodes
    driver = Driver(engine)
    driver.start(capacity.slots - 1, prompt(9))
    driver.prefill(capacity.slots - 1)
    driver.decode(2)
    assert len(driver.tokens[capacity.slots - 1]) == 3


def test_long_histories_arrive_in_several_batches(
    tmp_path: Path, load_twin: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "STARTS_BYTES", 1)
    monkeypatch.setattr(staging, "starts_bytes", lambda plan: 1536)
    checkpoint(tmp_path)
    driver = Driver(load_twin(options(tmp_path)))
    for slot in range(4):
        strong = {slot + 5: 1e4}
        driver.start(slot, prompt(200), Sampling(temperature=0.0, presence_penalty=1.0, logit_bias=strong))
    driver.prefill(*range(4), chunk=24)
    driver.decode(2, *range(4))
    assert [driver.tokens[slot] for slot in range(4)] == [[slot + 5] * 3 for slot in range(4)]


def test_progress_goes_up_to_the_end(tmp_path: Path, load_twin: Load) -> None:
    checkpoint(tmp_path)
    heard: list[tuple[str, float]] = []
    loading.load_cuda_engine(options(tmp_path), lambda *event: heard.append(event), SETTINGS).close()
    shares = [share for _, share in heard]
    assert shares == sorted(shares)
    assert heard[-1] == ("graphs", 1.0)
