"""Every model family on the reference engine against the logits of transformers, and against itself."""

from __future__ import annotations

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
from tests.parity.families import CASES, PROMPT_LENGTHS, VOCAB, Case, build_checkpoint, expected, prompt

SLOTS = 3
PAGES_PER_SLOT = 4
LONGEST = max(PROMPT_LENGTHS)
Logits = NDArray[np.float32]

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


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
        self.exact = not self.config.has_recurrent_state
        """Whether chunking and batch change no bit, rather than little."""

    def run(self, *pieces: tuple[int, int, NDArray[np.int32]]) -> list[Logits]:
        """One pass over (slot, start, tokens) pieces; logits [n, vocab] of each piece's rows."""
        batch = make_batch([Segment(*piece) for piece in pieces], self.block_tables, self.model.rows)
        hidden = self.model.forward(batch)
        logits = self.model.logits(hidden[: batch.rows])
        return np.split(logits, batch.offsets[1:-1])

    def in_pieces(self, slot: int, tokens: NDArray[np.int32], *lengths: int) -> Logits:
        """A fresh sequence in passes of the given lengths, which fill it."""
        assert sum(lengths) == len(tokens)
        self.model.forget(slot)
        starts = np.cumsum([0, *lengths[:-1]])
        return np.concatenate(
            [
                self.run((slot, start, tokens[start : start + n]))[0]
                for start, n in zip(starts, lengths, strict=True)
            ]
        )

    def assert_same(self, actual: Logits, wanted: Logits, what: str) -> None:
        if self.exact:
            different = np.flatnonzero((actual != wanted).any(axis=1))
            assert len(different) == 0, f"{what}: row {different[0]} differs"
        else:
            assert relative_error(actual, wanted) < 1e-5, what


@cache
def runner(case_id: str) -> Runner:
    return Runner(next(case for case in CASES if case.id == case_id))


@cache
def one_shot(case_id: str, length: int) -> Logits:
    return runner(case_id).in_pieces(0, prompt(length), length)


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
def test_a_prompt_cut_anywhere_agrees_with_one_shot(case: Case) -> None:
    model = runner(case.id)
    length = PAGE_SIZE + 1
    for cut in range(1, length):
        pieces = model.in_pieces(1, prompt(length), cut, length - cut)
        model.assert_same(pieces, one_shot(case.id, length), f"cut at {cut}")
    for lengths in ((64, 64, 72), (1, 63, 100, 36), (150, 1, 1, 48), (199, 1)):
        pieces = model.in_pieces(2, prompt(LONGEST), *lengths)
        model.assert_same(pieces, one_shot(case.id, LONGEST), f"chunks of {lengths}")


@every_case
def test_token_by_token_agrees_with_prefill(case: Case) -> None:
    model = runner(case.id)
    for length in (PAGE_SIZE + 1, LONGEST) if case.name == "plain" else (PAGE_SIZE + 1,):
        stepped = model.in_pieces(0, prompt(length), *[1] * length)
        model.assert_same(stepped, one_shot(case.id, length), f"{length} single tokens")


@every_case
def test_sequences_in_one_pass_do_not_meet(case: Case) -> None:
    """Chunks of two sequences and a decode row of a third share every product."""
    model = runner(case.id)
    tokens = prompt(LONGEST)
    wanted = one_shot(case.id, LONGEST)
    for slot in range(SLOTS):
        model.model.forget(slot)
    first = model.run((2, 0, tokens[:128]))[0]
    second = model.run((0, 0, tokens[:64]), (1, 0, tokens[:150]), (2, 128, tokens[128:129]))
    third = model.run((2, 129, tokens[129:130]), (0, 64, tokens[64:128]))
    model.assert_same(np.concatenate([first, second[2], third[0]]), wanted[:130], "slot 2")
    model.assert_same(np.concatenate([second[0], third[1]]), wanted[:128], "slot 0")
    model.assert_same(second[1], wanted[:150], "slot 1")
