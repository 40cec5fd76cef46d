"""The reference engine through its interface: what a plan may say, and what a sequence gets for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.checkpoint import open_checkpoint
from engine.errors import ModelError
from engine.factory import load_engine
from engine.interface import (
    PAGE_SIZE,
    Engine,
    EngineError,
    PageAssignment,
    Sampling,
    StepPlan,
)
from engine.options import EngineOptions
from engine.reference import ReferenceEngine
from engine.reference.row_widths import Widths, prove
from tests.parity.reference_driver import GREEDY, Driver

SAMPLED = Sampling(temperature=0.9, top_p=0.95, top_k=50, repetition_penalty=1.1, seed=77, logprobs=3)
PROMPT = list(range(5, 5 + 100))


def options(model: Path) -> EngineOptions:
    return EngineOptions(
        model,
        "reference",
        max_sequences=6,
        max_sequence_length=512,
        max_step_tokens=300,
        kv_pages=40,
        threads=1,
    )


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint: Path) -> Iterator[Engine]:
    engine = load_engine(options(tiny_checkpoint))
    yield engine
    engine.close()


@pytest.fixture
def engine(loaded: Engine) -> Engine:
    """The shared engine with all slots empty."""
    loaded.execute(StepPlan(0, releases=tuple(range(loaded.capacity.slots))))
    return loaded


def ints(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def alone(engine: Engine, prompt: list[int], sampling: Sampling, tokens: int) -> Driver:
    """What a sequence gets with the whole engine to itself, prefilled in one chunk."""
    driver = Driver(engine)
    driver.start(0, prompt, sampling)
    driver.prefill(0)
    driver.decode(tokens - 1)
    driver.step(releases=[0])
    return driver


# -- the same tokens and log-probabilities whatever shares the batch -----------------------------------


def test_batch_and_chunking_change_no_bit(engine: Engine) -> None:
    wanted = alone(engine, PROMPT, SAMPLED, 40)
    driver = Driver(engine)
    for slot in (0, 1, 3, 4):
        driver.start(slot, PROMPT[: 10 + 20 * slot], replace(SAMPLED, seed=slot))
    driver.prefill(0, 1)
    driver.start(2, PROMPT, SAMPLED)
    driver.step(prefills=[(2, 7), (3, 33)], decodes=[0, 1])
    driver.step(prefills=[(2, 60), (3, None)], decodes=[0])
    driver.step(prefills=[(4, None), (2, None)], decodes=[3, 1])
    for step in range(39):
        driver.step(decodes=[2] if step % 3 else [0, 1, 2, 3, 4])
    assert driver.tokens[2] == wanted.tokens[0]
    assert driver.logprobs[2] == wanted.logprobs[0]


def test_prefix_pages_of_another_slot_change_no_bit(engine: Engine) -> None:
    wanted = alone(engine, PROMPT, SAMPLED, 20)
    driver = Driver(engine)
    driver.start(1, [*PROMPT[:64], 9, 9, 9])
    driver.prefill(1)
    driver.start(4, PROMPT, SAMPLED, shared=driver.pages[1][:1])
    driver.step(prefills=[(4, None)], decodes=[1])
    driver.step(decodes=[4], releases=[1])
    driver.decode(18, 4)
    assert driver.tokens[4] == wanted.tokens[0]
    assert driver.logprobs[4] == wanted.logprobs[0]


@pytest.mark.parametrize("sampled", [1, 12, 29])
def test_a_resumed_sequence_goes_on_as_if_never_interrupted(engine: Engine, sampled: int) -> None:
    wanted = alone(engine, PROMPT, SAMPLED, 30)
    driver = Driver(engine)
    driver.start(3, PROMPT, SAMPLED, output=wanted.tokens[0][:sampled])
    driver.prefill(3, chunk=50)
    driver.decode(29 - sampled)
    assert driver.tokens[3] == wanted.tokens[0][sampled:]
    assert driver.logprobs[3] == wanted.logprobs[0][sampled:]


def test_seeds_differ_and_repeat(engine: Engine) -> None:
    texts = [alone(engine, PROMPT, replace(SAMPLED, seed=seed), 20).tokens[0] for seed in (1, 2, 1)]
    assert texts[0] == texts[2]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("chunk", [None, 1, 13, 64])
def test_prompt_logprobs_do_not_depend_on_chunks(engine: Engine, chunk: int | None) -> None:
    sampling = replace(GREEDY, prompt_logprobs=2)
    driver = Driver(engine)
    driver.start(0, PROMPT, sampling)
    driver.prefill(0, chunk=chunk)
    entries = driver.prompt_logprobs[0]
    assert len(entries) == len(PROMPT) - 1
    for index in (1, 12, 13, 64, 99):
        before = Driver(engine)
        before.start(1, PROMPT[:index], replace(GREEDY, logit_bias={PROMPT[index]: 1e4}, logprobs=2))
        before.prefill(1)
        assert before.tokens[1] == [PROMPT[index]]
        assert before.logprobs[1] == [entries[index - 1]]


# -- stopping ------------------------------------------------------------------------------------------


def test_a_stop_token_makes_the_slot_inert(engine: Engine) -> None:
    free = alone(engine, PROMPT, GREEDY, 12).tokens[0]
    stop = free[5]
    ends = free.index(stop) + 1
    driver = Driver(engine)
    driver.start(0, PROMPT, replace(GREEDY, stop_token_ids=frozenset({stop})))
    driver.start(1, PROMPT)
    driver.prefill(0, 1)
    results = [driver.step(decodes=[0, 1]) for _ in range(11)]
    assert driver.tokens[0] == free[:ends]
    assert driver.stopped[0]
    assert driver.tokens[1] == free, "its neighbour goes on"
    assert all(result.slots == [1] for result in results[ends:])


def test_min_tokens_holds_stops_back(engine: Engine) -> None:
    free = alone(engine, PROMPT, GREEDY, 4).tokens[0]
    sampling = replace(GREEDY, stop_token_ids=frozenset(free), min_tokens=3)
    driver = alone(engine, PROMPT, sampling, 10)
    assert not set(driver.tokens[0][:3]) & set(free)


# -- faults --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def poisonous(tiny_checkpoint: Path) -> Iterator[ReferenceEngine]:
    """An engine whose token 7 embeds to NaN."""
    with open_checkpoint(tiny_checkpoint) as checkpoint:
        engine = ReferenceEngine(checkpoint, options(tiny_checkpoint))
    model = engine._model
    assert model is not None
    model._embedding[7] = np.nan
    yield engine
    engine.close()


def test_a_failed_sequence_fails_alone_and_leaves_clean_pages(poisonous: ReferenceEngine) -> None:
    clean = [token for token in PROMPT if token != 7]
    wanted = alone(poisonous, clean, GREEDY, 20).tokens[0]
    driver = Driver(poisonous)
    driver.start(0, [*clean, 7, 8])
    driver.start(1, clean)
    driver.prefill(0, 1)
    assert list(driver.faults) == [0]
    assert "not finite" in driver.faults[0]
    driver.step(decodes=[0, 1])
    driver.decode(18, 1)
    assert driver.tokens[1] == wanted
    assert driver.tokens[0] == []
    driver.step(releases=[0])
    driver.start(2, clean)
    driver.pages[2] += driver.pages[0]
    driver.prefill(2)
    driver.decode(19, 2)
    assert driver.tokens[2] == wanted, "the failed sequence's pages are fit for reuse"


def test_a_fault_in_the_middle_of_a_prompt_is_told_at_once(poisonous: ReferenceEngine) -> None:
    driver = Driver(poisonous)
    driver.start(0, [1, 2, 7, 3, 4, 5])
    driver.step(prefills=[(0, 3)])
    assert list(driver.faults) == [0]
    assert driver.step(prefills=[(0, None)]).slots == [], "what was already planned does nothing"


# -- plans that break the contract ---------------------------------------------------------------------


BROKEN = {
    "slot 0 stands in two rows": StepPlan(1, decodes=(0, 0)),
    "slot 1: it cannot decode before": StepPlan(1, decodes=(1,)),
    "page 40 is not in 0 … 39": StepPlan(1, pages=(PageAssignment(1, 2, 40),), decodes=(0,)),
    "slot 0: no sequence has been started": StepPlan(1, releases=(0, 1), decodes=(0,)),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_plan_that_breaks_the_contract_is_refused_whole(engine: Engine, message: str) -> None:
    """Slot 0 decodes and slot 1 is in mid-prefill; both go on afterwards as if nothing had been asked."""
    wanted = alone(engine, PROMPT, GREEDY, 8).tokens[0]
    driver = Driver(engine)
    driver.start(0, PROMPT)
    driver.start(1, PROMPT)
    driver.step(prefills=[(0, None), (1, 70)])
    with pytest.raises(ValueError, match=f"step 1: .*{message}"):
        engine.execute(BROKEN[message])
    driver.step(prefills=[(1, None)], decodes=[0])
    driver.decode(6, 0, 1)
    assert driver.tokens[0] == wanted
    assert driver.tokens[1] == wanted[:7]


# -- life ----------------------------------------------------------------------------------------------


def test_an_empty_plan_yields_nothing(engine: Engine) -> None:
    handle = engine.execute(StepPlan(1))
    assert handle.is_done()
    assert handle.result().slots == []


def test_info_and_capacity(engine: Engine) -> None:
    assert (engine.capacity.slots, engine.capacity.pages, engine.capacity.max_sequence_length) == (6, 40, 512)
    assert engine.capacity.prefix_cacheable
    assert engine.info.engine == "reference"
    assert engine.info.fallbacks == ()
    assert engine.info.memory_plan["weights"] == 4 * engine.info.parameters
    assert engine.info.memory_plan["kv_pages"] == 40 * PAGE_SIZE * 4 * 2 * 2 * 2 * 16


def test_loading_tells_its_progress_and_a_closed_engine_refuses_work(tiny_checkpoint: Path) -> None:
    heard: list[float] = []
    engine = load_engine(options(tiny_checkpoint), lambda stage, fraction: heard.append(fraction))
    assert heard == sorted(heard)
    assert heard[-1] == 1.0
    assert len(heard) > 5
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.execute(StepPlan(0))


def test_the_factory_says_what_it_cannot_load(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match="There is no engine 'tpu'; choose auto, cuda, reference or simulated"
    ):
        load_engine(EngineOptions(tiny_checkpoint, engine="tpu"))
    with pytest.raises(ModelError):
        load_engine(EngineOptions(tmp_path / "nowhere", engine="reference"))
    simulated = load_engine(EngineOptions(tiny_checkpoint, engine="simulated"))
    assert simulated.info.engine == "simulated"
    simulated.close()


def test_auto_says_why_it_took_the_reference_engine(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.factory._why_no_cuda", lambda _device: "there is no GPU")
    engine = load_engine(EngineOptions(tiny_checkpoint, max_sequences=2))
    assert engine.info.engine == "reference"
    assert engine.info.fallbacks[0] == "the reference engine runs instead of the CUDA engine: there is no GPU"


# -- row widths ----------------------------------------------------------------------------------------


def test_padding_goes_to_whole_blocks_and_then_the_least_width() -> None:
    widths = Widths((8, 24, 64))
    assert [widths.pad(n) for n in (1, 8, 9, 25, 64, 65, 88, 128, 130)] == [
        8,
        8,
        24,
        64,
        64,
        72,
        88,
        128,
        136,
    ]


def test_widths_that_round_differently_are_found_out() -> None:
    """A product that is a last bit off below 16 rows, as small-matrix routines are."""

    def product(rows: np.ndarray) -> np.ndarray:
        return np.nextafter(rows, np.float32(9)) if len(rows) < 16 else rows

    assert prove([(5, product)], (8, 16, 32)) == Widths((16, 32))
    assert prove([(5, lambda rows: rows + np.arange(len(rows))[:, None])], (8, 16)).position_free is False
