"""The simulated engine: strict about plans, the same tokens whatever happens, and cheap when asked to be."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.errors import CheckpointError, ConfigError, ModelError
from engine.interface import (
    EngineError,
    PageAssignment,
    PrefillChunk,
    Sampling,
    SlotStart,
    StepPlan,
    StepResult,
)
from engine.options import EngineOptions
from engine.simulated import SimulatedEngine, SimulatedOptions
from engine.simulated.tokens import advance, advance_all

NO_TOKENS = np.empty(0, np.int32)
PROMPT = np.random.default_rng(3).integers(0, 1000, 200, dtype=np.int32)
OPTIONS = SimulatedOptions(slots=3, pages=9, vocab_size=1000, max_step_tokens=256)


def start(
    slot: int, prompt: np.ndarray = PROMPT, output: np.ndarray = NO_TOKENS, **sampling: object
) -> SlotStart:
    return SlotStart(slot, Sampling(**sampling), prompt, output)  # type: ignore[arg-type]


def table(slot: int, pages: list[int], first: int = 0) -> tuple[PageAssignment, ...]:
    return tuple(PageAssignment(slot, first + i, page) for i, page in enumerate(pages))


def chunk(slot: int, begin: int, end: int, prompt: np.ndarray = PROMPT) -> PrefillChunk:
    return PrefillChunk(slot, prompt[begin:end], begin, end == len(prompt))


class Driver:
    """Executes plans one by one."""

    def __init__(self, options: SimulatedOptions = OPTIONS) -> None:
        self.engine = SimulatedEngine(options)
        self.step = 0

    def run(self, **parts: object) -> StepResult:
        self.step += 1
        return self.engine.execute(StepPlan(self.step, **parts)).result()  # type: ignore[arg-type]

    def generate(self, n: int, slot: int = 0) -> list[int]:
        return [self.run(decodes=(slot,)).tokens[0] for _ in range(n)]

    def prefill(self, slot: int, pages: list[int], **sampling: object) -> int:
        result = self.run(
            starts=(start(slot, **sampling),), pages=table(slot, pages), prefills=(chunk(slot, 0, 200),)
        )
        assert result.slots == [slot]
        return result.tokens[0]


# ---- tokens


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(0, 2**64 - 1))
def test_advance_all_is_advance_for_each(tokens: list[int], state: int) -> None:
    assert advance_all(state, np.array(tokens, np.int32)) == reduce(advance, tokens, state)


@pytest.mark.parametrize("n", [1023, 1024, 1025, 2049])
def test_advance_all_is_right_over_its_block_borders(n: int) -> None:
    tokens = np.random.default_rng(n).integers(0, 2**31, n, dtype=np.int32)
    assert advance_all(7, tokens) == reduce(advance, tokens.tolist(), 7)


def test_tokens_do_not_depend_on_chunks_slots_pages_or_resumption() -> None:
    once = Driver()
    expected = [once.prefill(0, [0, 1, 2, 3]), *once.generate(9)]

    chunked = Driver()
    chunked.run(starts=(start(2),), pages=table(2, [8, 5, 7, 0]), prefills=(chunk(2, 0, 63),))
    chunked.run(prefills=(chunk(2, 63, 129),))
    first = chunked.run(prefills=(chunk(2, 129, 200),)).tokens
    assert [*first, *chunked.generate(9, slot=2)] == expected

    resumed = Driver()
    output = np.array(expected[:4], np.int32)
    known = np.concatenate((PROMPT, output))
    first = resumed.run(
        starts=(start(0, output=output),), pages=table(0, [0, 1, 2, 3]), prefills=(chunk(0, 0, 204, known),)
    ).tokens
    assert [*first, *resumed.generate(5)] == expected[4:]


def test_tokens_depend_on_every_prompt_token_and_on_the_seed() -> None:
    expected = Driver().prefill(0, [0, 1, 2, 3])
    others = []
    for position in (0, 63, 64, 199):
        prompt = PROMPT.copy()
        prompt[position] += 1
        result = Driver().run(
            starts=(start(0, prompt),), pages=table(0, [0, 1, 2, 3]), prefills=(chunk(0, 0, 200, prompt),)
        )
        others += result.tokens
    others.append(Driver().prefill(0, [0, 1, 2, 3], seed=1))
    assert sum(other == expected for other in others) <= 1  # one in a thousand is chance


@pytest.mark.parametrize("fields", [{}, {"min_tokens": 5}, {"logprobs": 2}, {"seed": 2**64 - 1}])
@pytest.mark.parametrize("stop_one_in", [0, 30])
def test_without_validation_the_tokens_are_the_same(fields: dict[str, int], stop_one_in: int) -> None:
    results = []
    for validate in (True, False):
        driver = Driver(replace(OPTIONS, validate=validate, stop_one_in=stop_one_in))
        tokens = [driver.prefill(0, [0, 1, 2, 3], stop_token_ids=frozenset(range(20)), **fields)]
        stopped = False
        while not stopped and len(tokens) < 50:
            result = driver.run(decodes=(0,))
            tokens += result.tokens
            (stopped,) = result.stopped
        results.append(tokens)
    assert results[0] == results[1]
    assert len(results[0]) > 1


def test_a_stopped_slot_is_inert_and_stop_tokens_wait_for_min_tokens() -> None:
    driver = Driver(replace(OPTIONS, stop_one_in=1))
    tokens = [driver.prefill(0, [0, 1, 2, 3], stop_token_ids=frozenset({4, 5}), min_tokens=3)]
    tokens += driver.generate(2)
    assert not {4, 5} & set(tokens)
    last = driver.run(decodes=(0,))
    assert (last.tokens, last.stopped) == ([4], [True])
    assert driver.run(decodes=(0,)).slots == []


def test_generated_ids_keep_to_the_range_given() -> None:
    driver = Driver(replace(OPTIONS, token_ids=(10, 20, 30)))
    driver.prefill(0, [0, 1, 2, 3])
    assert set(driver.generate(40)) == {10, 20, 30}


def test_prompt_logprobs_do_not_depend_on_chunks() -> None:
    whole = Driver().run(
        starts=(start(1, prompt_logprobs=2),), pages=table(1, [0, 1, 2, 3]), prefills=(chunk(1, 0, 200),)
    )
    assert len(whole.prompt_logprobs[1]) == 199
    driver = Driver()
    first = driver.run(
        starts=(start(1, prompt_logprobs=2),), pages=table(1, [0, 1, 2, 3]), prefills=(chunk(1, 0, 70),)
    )
    second = driver.run(prefills=(chunk(1, 70, 200),))
    assert first.prompt_logprobs[1] + second.prompt_logprobs[1] == whole.prompt_logprobs[1]
    assert len(first.prompt_logprobs[1]) == 69


# ---- plans that break the contract


def begun() -> Driver:
    """Slot 0 decodes on pages 0–3; slot 1 has run 100 of its tokens on pages 4–7."""
    driver = Driver()
    driver.prefill(0, [0, 1, 2, 3])
    driver.run(starts=(start(1),), pages=table(1, [4, 5, 6, 7]), prefills=(chunk(1, 0, 100),))
    return driver


BREACHES: dict[str, tuple[dict[str, object], str]] = {
    "release of a free slot": ({"releases": (2,), "decodes": (0,)}, "slot 2 is not occupied"),
    "start in an occupied slot": ({"starts": (start(0),), "decodes": (1,)}, "slot 0 is occupied"),
    "start in no slot": ({"starts": (start(3),), "decodes": (0,)}, "slot 3 does not exist"),
    "a token that does not exist": (
        {"starts": (start(2, np.array([1000], np.int32)),), "decodes": (0,)},
        "outside the vocabulary",
    ),
    "an empty prompt": ({"starts": (start(2, NO_TOKENS),), "decodes": (0,)}, "empty prompt"),
    "a page that does not exist": ({"pages": table(0, [9], 4), "decodes": (0,)}, "page 9 does not exist"),
    "a page twice in a table": ({"pages": table(0, [2], 4), "decodes": (0,)}, "page 2 twice"),
    "a gap in a table": ({"pages": table(0, [8], 5), "decodes": (0,)}, "page 5 of its table next"),
    "a page of a free slot": ({"pages": table(2, [8]), "decodes": (0,)}, "slot 2 is not occupied"),
    "two rows of one slot": ({"prefills": (chunk(1, 100, 200),), "decodes": (1,)}, "two rows"),
    "a chunk too early": ({"prefills": (chunk(1, 99, 200),)}, "100 positions computed, a chunk starts at 99"),
    "a chunk too late": (
        {"prefills": (chunk(1, 101, 200),)},
        "100 positions computed, a chunk starts at 101",
    ),
    "a chunk of nothing": ({"prefills": (chunk(1, 100, 100),), "decodes": (0,)}, "chunk 100 … 100"),
    "a chunk with wrong tokens": (
        {"prefills": (PrefillChunk(1, PROMPT[0:100], 100, True),)},
        "other tokens than those it started with",
    ),
    "a last chunk that is not called so": (
        {"prefills": (PrefillChunk(1, PROMPT[100:200], 100, False),)},
        "is_last is wrong",
    ),
    "a chunk that is called last and is not": (
        {"prefills": (PrefillChunk(1, PROMPT[100:150], 100, True),)},
        "is_last is wrong",
    ),
    "a decode row in the middle of prefill": ({"decodes": (1,)}, "prefill is not over"),
    "a decode row of a free slot": ({"decodes": (2,)}, "slot 2 is not occupied"),
    "an empty plan": ({}, "the plan has 0 tokens"),
    "more than the budget": (
        {
            "starts": (start(2, np.zeros(157, np.int32)),),
            "pages": table(2, [8]),
            "prefills": (chunk(1, 100, 200), PrefillChunk(2, np.zeros(157, np.int32), 0, True)),
        },
        "the plan has 257 tokens",
    ),
    "a write to a page that others read": (
        {"starts": (start(2),), "pages": table(2, [0, 1, 2, 3]), "prefills": (chunk(2, 128, 200),)},
        "slot 2 writes to page 2, which others use too",
    ),
    "a prefix that nobody has computed": (
        {"starts": (start(2),), "pages": table(2, [8]), "prefills": (chunk(2, 64, 70),)},
        "page 8 does not hold positions 0 … 63",
    ),
    "pages in the wrong order": (
        {"starts": (start(2),), "pages": table(2, [1, 0, 8]), "prefills": (chunk(2, 128, 150),)},
        "page 1 does not hold positions 0 … 63",
    ),
    "a prefix of another sequence": (
        {
            "starts": (start(2, PROMPT[::-1].copy()),),
            "pages": table(2, [0, 8]),
            "prefills": (chunk(2, 64, 100, PROMPT[::-1].copy()),),
        },
        "page 0 does not hold positions 0 … 63",
    ),
    "a prefix that is computed in the same step": (
        {
            "starts": (start(2),),
            "pages": table(2, [4, 5, 8]),
            "prefills": (chunk(1, 100, 200), chunk(2, 128, 150)),
        },
        "page 5 does not hold positions 64 … 127",
    ),
}


@pytest.mark.parametrize("name", BREACHES)
def test_a_plan_that_breaks_the_contract_is_refused(name: str) -> None:
    parts, text = BREACHES[name]
    with pytest.raises(ValueError, match=text):
        begun().run(**parts)


def test_the_plans_before_those_breaches_are_fine() -> None:
    driver = begun()
    assert driver.run(prefills=(chunk(1, 100, 200),), decodes=(0,)).slots == [1, 0]
    shared = driver.run(
        starts=(start(2),), pages=table(2, [4, 5, 6, 8]), prefills=(chunk(2, 192, 200),), decodes=(0, 1)
    )
    assert shared.slots == [2, 0, 1]


def test_a_decode_row_without_a_page_is_refused() -> None:
    driver = begun()
    driver.generate(56)  # positions 200 … 255 fill the fourth page
    with pytest.raises(ValueError, match="slot 0 has no page for position 256"):
        driver.run(decodes=(0,))


def test_a_page_that_was_given_away_too_early_is_noticed() -> None:
    driver = begun()
    driver.run(releases=(0,), prefills=(chunk(1, 100, 200),))
    other = PROMPT + 1
    other %= 1000
    with pytest.raises(ValueError, match="writes to page 4, which others use too"):
        driver.run(starts=(start(0, other),), pages=table(0, [4]), prefills=(chunk(0, 0, 60, other),))


def test_a_cached_page_that_was_overwritten_is_noticed() -> None:
    driver = begun()
    other = PROMPT[::-1].copy()
    driver.run(
        releases=(0,), starts=(start(2, other),), pages=table(2, [0]), prefills=(chunk(2, 0, 64, other),)
    )
    with pytest.raises(ValueError, match="page 0 does not hold"):
        driver.run(
            releases=(2,), starts=(start(0),), pages=table(0, [0, 1, 2, 3]), prefills=(chunk(0, 64, 200),)
        )


def test_steps_must_come_in_order_and_no_more_than_agreed_at_a_time() -> None:
    driver = begun()
    driver.step += 1
    with pytest.raises(ValueError, match="step 4 comes where 3 should"):
        driver.run(decodes=(0,))
    engine = SimulatedEngine(OPTIONS)
    plan = StepPlan(0, starts=(start(0),), pages=table(0, [0, 1, 2, 3]), prefills=(chunk(0, 0, 200),))
    handles = [engine.execute(plan), engine.execute(StepPlan(1, decodes=(0,)))]
    with pytest.raises(ValueError, match="2 steps are under way already"):
        engine.execute(StepPlan(2, decodes=(0,)))
    assert [len(handle.result().tokens) for handle in handles] == [1, 1]


def test_a_sequence_may_not_outgrow_the_longest() -> None:
    driver = Driver(replace(OPTIONS, max_sequence_length=202))
    driver.prefill(0, [0, 1, 2, 3])
    driver.generate(1)
    with pytest.raises(ValueError, match="beyond the longest sequence"):
        driver.run(decodes=(0,))


# ---- misfortunes


def test_a_fault_token_fails_its_sequence_alone_and_spoils_what_it_wrote() -> None:
    driver = Driver(replace(OPTIONS, fault_token=int(PROMPT[100])))
    good = np.arange(10, dtype=np.int32)
    result = driver.run(
        starts=(start(0), start(1, good)),
        pages=(*table(0, [0, 1, 2, 3]), *table(1, [4])),
        prefills=(chunk(0, 0, 190), chunk(1, 0, 10, good)),
    )
    assert list(result.faults) == [0]
    assert result.slots == [1]
    follower = driver.run(
        starts=(start(2),), pages=table(2, [0, 8]), prefills=(chunk(2, 64, 90),), decodes=(1,)
    )
    assert "spoilt" in follower.faults[2]
    assert driver.run(prefills=(chunk(0, 190, 200),), decodes=(1,)).slots == [1]


def test_a_break_token_breaks_the_engine() -> None:
    driver = Driver(replace(OPTIONS, break_token=int(PROMPT[5])))
    with pytest.raises(EngineError, match="breaks the simulated engine"):
        driver.prefill(0, [0, 1, 2, 3])


def test_a_closed_engine_takes_no_plans_and_may_be_closed_again() -> None:
    driver = begun()
    driver.engine.close()
    driver.engine.close()
    with pytest.raises(EngineError, match="closed"):
        driver.run(decodes=(0,))


# ---- time


def test_steps_take_their_time_one_after_the_other() -> None:
    now = [50.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    engine = SimulatedEngine(replace(OPTIONS, step_s=0.25), clock=lambda: now[0], sleep=sleep)
    first = engine.execute(
        StepPlan(0, starts=(start(0),), pages=table(0, [0, 1, 2, 3]), prefills=(chunk(0, 0, 200),))
    )
    second = engine.execute(StepPlan(1, decodes=(0,)))
    assert not first.is_done()
    first.result()
    assert now[0] == pytest.approx(50.25)
    assert first.is_done()
    assert not second.is_done()
    second.result()
    assert now[0] == pytest.approx(50.5)
    now[0] += 10
    third = engine.execute(StepPlan(2, decodes=(0,)))
    third.result()
    assert now[0] == pytest.approx(60.75)


def test_steps_that_take_no_time_are_done_at_once() -> None:
    def never(seconds: float) -> None:
        raise AssertionError("nothing to wait for")

    engine = SimulatedEngine(OPTIONS, sleep=never)
    handle = engine.execute(
        StepPlan(0, starts=(start(0),), pages=table(0, [0, 1, 2, 3]), prefills=(chunk(0, 0, 200),))
    )
    assert handle.is_done()
    assert len(handle.result().tokens) == 1


# ---- a real model's vocabulary


def test_loaded_from_a_checkpoint_it_speaks_ordinary_words(tiny_checkpoint: Path) -> None:
    stages: list[tuple[str, float]] = []
    engine = SimulatedEngine.load(
        EngineOptions(tiny_checkpoint, max_sequences=2, max_sequence_length=128, simulated_step_us=100.0),
        lambda stage, done: stages.append((stage, done)),
    )
    assert stages[-1][1] == 1.0
    assert engine.capacity.slots == 2
    assert engine.capacity.pages == 4
    assert engine.info.engine == "simulated"
    tokenizer = Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    prompt = np.array(tokenizer.encode("hello").ids, np.int32)
    engine.execute(
        StepPlan(
            0,
            starts=(start(0, prompt),),
            pages=table(0, [0, 1]),
            prefills=(chunk(0, 0, len(prompt), prompt),),
        )
    ).result()
    tokens = [engine.execute(StepPlan(1 + i, decodes=(0,))).result().tokens[0] for i in range(50)]
    assert all(0 <= token < engine.info.vocab_size for token in tokens)
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    assert not any(content in text for content in special)
    assert all(character.isalpha() or character == " " for character in text)


@pytest.mark.parametrize(
    ("files", "error", "text"),
    [
        ({}, ConfigError, "has no config.json"),
        ({"config.json": "{"}, ConfigError, "config.json is not valid JSON"),
        ({"config.json": "[]"}, ConfigError, "does not hold a JSON object"),
        ({"config.json": "{}"}, ConfigError, "gives no vocab_size"),
        ({"config.json": '{"vocab_size": 9}'}, ConfigError, "has no tokenizer.json"),
        (
            {"config.json": '{"vocab_size": 9}', "tokenizer.json": '{"model": {"vocab": {}}}'},
            CheckpointError,
            "no tokens besides special ones",
        ),
        ({"config.json": '{"text_config": null}'}, ConfigError, "gives no vocab_size"),
        *(
            (
                {"config.json": '{"vocab_size": 9}', "tokenizer.json": tokenizer},
                ConfigError,
                "tokenizer.json holds no vocabulary of a kind that is known",
            )
            for tokenizer in (
                "{}",
                '{"model": null}',
                '{"model": []}',
                '{"model": {"vocab": null}}',
                '{"model": {"vocab": {"a": null}}}',
                '{"model": {"vocab": ["a"]}}',
                '{"model": {"vocab": {"a": 1}}, "added_tokens": [7]}',
                '{"model": {"vocab": {"a": 1}}, "added_tokens": [{"id": []}]}',
            )
        ),
    ],
)
def test_a_model_without_a_usable_vocabulary_is_refused(
    tmp_path: Path, files: dict[str, str], error: type[ModelError], text: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(error, match=text):
        SimulatedEngine.load(EngineOptions(tmp_path), lambda stage, done: None)


def test_a_model_that_is_not_there_or_is_no_gguf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no model at"):
        SimulatedEngine.load(EngineOptions(tmp_path / "absent"), lambda stage, done: None)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 30)
    with pytest.raises(CheckpointError, match="GGUF version 0 is not supported"):
        SimulatedEngine.load(EngineOptions(broken), lambda stage, done: None)


@pytest.mark.parametrize("kind", ["unigram", "no words"])
def test_other_vocabularies_work_too(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 4}, "architectures": ["Some"]}')
    pieces = ["<s>", "▁the", "▁cat", "."] if kind == "unigram" else ["<s>", "1", "2", "."]
    tokenizer = {
        "added_tokens": [{"id": 0, "content": "<s>"}],
        "model": {"vocab": [[piece, 0.0] for piece in pieces]},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    engine = SimulatedEngine.load(EngineOptions(tmp_path), lambda stage, done: None)
    assert engine._token_ids == ((1, 2) if kind == "unigram" else (1, 2, 3))
    assert bool(engine.info.fallbacks) == (kind == "no words")
