"""Every model family on the reference engine against the logits of transformers, and against itself."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.checkpoint import open_checkpoint
from engine.interface import PAGE_SIZE
from engine.reference.batch import Segment, make_batch
from engine.reference.model import ReferenceModel
from engine.reference.threads import BlasThreads
from tests.parity.families import CASES, PROMPT_LENGTHS, VOCAB, Case, build_checkpoint, expected, prompt

SLOTS = 3
PAGES_PER_SLOT = 4
LONGEST = max(PROMPT_LENGTHS)
Logits = NDArray[np.float32]

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Products this small only wait for a second thread."""
    threads = BlasThreads(1)
    yield
    threads.close()


class Runner:
    """A loaded model, driven below the plans, so that the logits of every row can be seen."""

    def __init__(self, case: Case) -> None:
        with TemporaryDirectory() as folder:
            build_checkpoint(case, Path(folder))
            with open_checkpoint(Path(folder)) as checkpoint:
                self.config = checkpoint.config
                self.model = ReferenceModel(checkpoint, pages=SLOTS * PAGES_PER_SLOT, slots=SLOTS)
        shuffled = np.random.default_rng(case.seed).permutation(SLOTS * PAGES_PER_SLOT)
        self.block_tables = shuffled.reshape(SLOTS, PAGES_PER_SLOT).astype(np.int32)

    def run(self, *segments: Segment) -> list[Logits]:
        """One pass; logits [n, vocab] of each segment's rows."""
        batch = make_batch(segments, self.block_tables, self.model.rows)
        hidden = self.model.forward(batch)
        logits = self.model.logits(hidden[: batch.rows])
        return np.split(logits, batch.offsets[1:-1])

    def in_chunks(self, slot: int, tokens: NDArray[np.int32], *lengths: int) -> Logits:
        """A fresh sequence in chunks of the given lengths, which fill it."""
        assert sum(lengths) == len(tokens)
        self.model.forget(slot)
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        chunks = [
            Segment(slot, start, tokens[start : start + n]) for start, n in zip(starts, lengths, strict=True)
        ]
        return np.concatenate([self.run(chunk)[0] for chunk in chunks])

    def decoded(self, slot: int, position: int, tokens: NDArray[np.int32]) -> Logits:
        """The tokens one by one as decode rows, from a position on that the slot has reached."""
        rows = [Segment(slot, position + i, tokens[i : i + 1], is_decode=True) for i in range(len(tokens))]
        return np.concatenate([self.run(row)[0] for row in rows])


def assert_same_bits(actual: Logits, wanted: Logits, what: str) -> None:
    different = np.flatnonzero((actual != wanted).any(axis=1))
    assert len(different) == 0, f"{what}: row {different[0]} differs"


@cache
def runner(case_id: str) -> Runner:
    return Runner(next(case for case in CASES if case.id == case_id))


@cache
def one_shot(case_id: str, length: int) -> Logits:
    return runner(case_id).in_chunks(0, prompt(length), length)


def relative_error(actual: Logits, wanted: Logits) -> float:
    """Largest difference over the largest logit."""
    return float(np.max(np.abs(actual - wanted)) / np.max(np.abs(wanted)))


@every_case
def test_logits_equal_transformers(case: Case) -> None:
    for length in PROMPT_LENGTHS:
        wanted = expected(case, length)
        actual = one_shot(case.id, length)
        assert actual.shape == (length, VOCAB)
        error = relative_error(actual[wanted.positions], wanted.logits)
        assert error < 1e-4, f"prompt of {length}: relative error {error:.2e}"


@every_case
def test_a_prompt_cut_anywhere_gives_the_same_bits(case: Case) -> None:
    model = runner(case.id)
    length = PAGE_SIZE + 1
    for cut in range(1, length):
        logits = model.in_chunks(1, prompt(length), cut, length - cut)
        assert_same_bits(logits, one_shot(case.id, length), f"cut at {cut}")
    for lengths in ((64, 64, 72), (1, 63, 100, 36), (150, 1, 1, 48), (30, 30, 30, 110), (199, 1)):
        logits = model.in_chunks(2, prompt(LONGEST), *lengths)
        assert_same_bits(logits, one_shot(case.id, LONGEST), f"chunks of {lengths}")


@every_case
def test_decode_agrees_with_prefill(case: Case) -> None:
    """In every bit where there is only attention; DeltaNet decodes by another form of its recurrence."""
    model = runner(case.id)
    tokens, wanted = prompt(PAGE_SIZE + 1), one_shot(case.id, PAGE_SIZE + 1)
    for prefilled in (0, 50):
        if prefilled:
            model.in_chunks(0, tokens[:prefilled], prefilled)
        else:
            model.model.forget(0)
        logits = model.decoded(0, prefilled, tokens[prefilled:])
        if model.config.has_recurrent_state:
            assert relative_error(logits, wanted[prefilled:]) < 2e-5
        else:
            assert_same_bits(logits, wanted[prefilled:], f"decoded from {prefilled} on")


@every_case
def test_sequences_in_one_pass_do_not_meet(case: Case) -> None:
    """Chunks of two sequences and a decode row of a third share every product; alone they get the same."""
    model = runner(case.id)
    tokens = prompt(LONGEST)
    wanted = one_shot(case.id, LONGEST)
    model.in_chunks(2, tokens[:128], 128)
    decoded_alone = model.decoded(2, 128, tokens[128:130])
    for slot in range(SLOTS):
        model.model.forget(slot)
    first = model.run(Segment(2, 0, tokens[:128]))
    second = model.run(
        Segment(0, 0, tokens[:50]), Segment(1, 0, tokens[:150]), Segment(2, 128, tokens[128:129], True)
    )
    third = model.run(Segment(2, 129, tokens[129:130], True), Segment(0, 50, tokens[50:128]))
    assert_same_bits(np.concatenate([second[0], third[1]]), wanted[:128], "slot 0")
    assert_same_bits(second[1], wanted[:150], "slot 1")
    assert_same_bits(np.concatenate([first[0]]), wanted[:128], "slot 2")
    assert_same_bits(np.concatenate([second[2], third[0]]), decoded_alone, "slot 2, decoding")
