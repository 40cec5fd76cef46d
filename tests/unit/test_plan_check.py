"""Which step plans are refused, and with what words: of each engine's own book of its slots."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.cuda.ledger import Ledger
from engine.interface import (
    EngineCapacity,
    PageAssignment,
    PrefillChunk,
    Sampling,
    SlotStart,
    StepPlan,
    pages_for,
)
from engine.plan_check import PlanLimits, SlotBook, check_plan
from engine.reference.slots import Slots

CAPACITY = EngineCapacity(6, 40, 512, 300, 1, True)
LIMITS = PlanLimits(CAPACITY, 320, stop_token_ids=3, logit_biases=2)
GREEDY = Sampling(temperature=0.0)
BOOKS = ("reference", "cuda")
DECODING = {0: 101, 2: 64, 4: 512}
"""Slots and their positions; slot 1 is in prefill at 70, 3 has stopped, 5 is empty."""


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def start(slot: int, **sampling: object) -> SlotStart:
    return SlotStart(slot, replace(GREEDY, **sampling), ints(1, 2, 3), ints())


def chunk(slot: int, first: int, *tokens: int, is_last: bool = False) -> PrefillChunk:
    return PrefillChunk(slot, ints(*tokens), first, is_last)


PAGE = (PageAssignment(5, 0, 39),)
BROKEN = {
    "slot 6 is not in 0 … 5": StepPlan(1, releases=(6,)),
    "slot -1 is not in": StepPlan(1, starts=(start(-1),)),
    "slot 2 is released twice": StepPlan(1, releases=(2, 2)),
    "slot 2 is started twice": StepPlan(1, starts=(start(2), start(2))),
    "slot 0 stands in two rows": StepPlan(1, decodes=(0, 0)),
    "slot 1 stands in two rows": StepPlan(1, prefills=(chunk(1, 70, 4),), decodes=(1,)),
    "slot 5: no sequence has been started": StepPlan(1, decodes=(5,)),
    "slot 0: no sequence has been started": StepPlan(1, releases=(0,), decodes=(0,)),
    "slot 5: no sequence": StepPlan(1, pages=(PageAssignment(5, 0, 0),)),
    "entry 8 is not in 0 … 7": StepPlan(1, pages=(PageAssignment(0, 8, 0),)),
    "page 40 is not in 0 … 39": StepPlan(1, pages=(PageAssignment(0, 2, 40),)),
    "page -1 is not in": StepPlan(1, pages=(PageAssignment(0, 2, -1),)),
    "slot 1: it cannot decode before": StepPlan(1, decodes=(1,)),
    "slot 5: it cannot decode before": StepPlan(1, starts=(start(5),), pages=PAGE, decodes=(5,)),
    "slot 0: its prefill is over": StepPlan(1, prefills=(chunk(0, 101, 4),)),
    "the chunk starts at 71, the sequence is at 70": StepPlan(1, prefills=(chunk(1, 71, 4),)),
    "the chunk starts at -1": StepPlan(1, starts=(start(5),), pages=PAGE, prefills=(chunk(5, -1, 4),)),
    "the chunk is empty": StepPlan(1, prefills=(chunk(1, 70),)),
    "entry 1 has no page": StepPlan(1, starts=(start(5),), pages=PAGE, prefills=(chunk(5, 64, 4),)),
    "entry 0 has no page": StepPlan(1, starts=(start(5),), prefills=(chunk(5, 0, 4),)),
    "513 tokens exceed": StepPlan(1, starts=(start(5),), prefills=(chunk(5, 512, 4),)),
    "301 rows exceed": StepPlan(1, prefills=(chunk(1, 70, *[4] * 301),)),
    "chunk holds a token": StepPlan(1, prefills=(chunk(1, 70, 4, 320),)),
    "chunk holds a token that": StepPlan(1, prefills=(chunk(1, 70, -1),)),
    "chunk is not a vector of integers": StepPlan(
        1,
        prefills=(PrefillChunk(1, np.array([1.5]), 70, False),),  # type: ignore[arg-type]
    ),
    "prompt holds a token": StepPlan(1, starts=(SlotStart(5, GREEDY, ints(320), ints()),)),
    "output holds a token": StepPlan(1, starts=(SlotStart(5, GREEDY, ints(), ints(-3)),)),
    "logit_bias names token 320": StepPlan(1, starts=(start(5, logit_bias={320: 1.0}),)),
    "logprobs is not in 0 … 20": StepPlan(1, starts=(start(5, logprobs=21),)),
    "slot 5: more than 2 biases": StepPlan(1, starts=(start(5, logit_bias=dict.fromkeys(range(3), 1.0)),)),
    "slot 5: more than 3 stop_token_ids": StepPlan(1, starts=(start(5, stop_token_ids=frozenset(range(4))),)),
    "slot 4: 513 tokens exceed": StepPlan(1, decodes=(4,)),
    "slot 2: block table entry 1 has no page": StepPlan(1, decodes=(0, 2)),
    "slot 7 is not in 0": StepPlan(1, decodes=(0, 7)),
    "slot 0: it cannot decode before": StepPlan(
        1, starts=(start(0),), pages=(PageAssignment(0, 0, 1),), decodes=(0,)
    ),
    "prompt log-probabilities need the prompt from position 0": StepPlan(
        1, starts=(start(5, prompt_logprobs=0),), pages=PAGE, prefills=(chunk(5, 1, 4),)
    ),
}


def history(slot: int, length: int, *, is_last: bool, first_step: int) -> list[StepPlan]:
    """Plans that bring a slot to a position, with the pages for it and no more."""
    pages = tuple(PageAssignment(slot, index, 8 * slot + index) for index in range(pages_for(length)))
    chunks = [
        PrefillChunk(slot, np.full(min(256, length - at), 4, np.int32), at, is_last and at + 256 >= length)
        for at in range(0, length, 256)
    ]
    first = StepPlan(first_step, starts=(start(slot),), pages=pages, prefills=(chunks[0],))
    return [first, *(StepPlan(first_step + i, prefills=(each,)) for i, each in enumerate(chunks[1:], 1))]


def histories() -> list[StepPlan]:
    plans = history(1, 70, is_last=False, first_step=0)
    for slot, position in (DECODING | {3: 10}).items():
        plans += history(slot, position, is_last=True, first_step=len(plans))
    return plans


def reference_book() -> Slots:
    slots = Slots(CAPACITY.slots, CAPACITY.max_sequence_length, LIMITS.vocab_size)
    for plan in histories():
        check_plan(plan, slots, LIMITS)
        for each in plan.starts:
            slots.start(each)
        for page in plan.pages:
            slots.block_tables[page.slot, page.index] = page.page
        for piece in plan.prefills:
            sequence = slots.occupied(piece.slot)
            sequence.position = piece.start + len(piece.tokens)
            sequence.last_token = 4 if piece.is_last else None
    slots.occupied(3).inert = True
    return slots


def cuda_book() -> Ledger:
    ledger = Ledger(LIMITS)
    for plan in histories():
        ledger.check(plan)
        ledger.apply(plan)
    ledger.ended(3, ledger.generation(3))
    return ledger


@pytest.fixture(scope="module", params=BOOKS)
def book(request: pytest.FixtureRequest) -> SlotBook:
    return reference_book() if request.param == "reference" else cuda_book()


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_plan_is_refused_in_plain_words(book: SlotBook, message: str) -> None:
    with pytest.raises(ValueError, match=f"step 1: .*{message}"):
        check_plan(BROKEN[message], book, LIMITS)


def test_what_a_refused_plan_asked_for_is_forgotten(book: SlotBook) -> None:
    before = book.block_tables.copy()
    plan = StepPlan(1, pages=(PageAssignment(2, 1, 39),), decodes=(0, 2, 5))
    with pytest.raises(ValueError, match="slot 5"):
        check_plan(plan, book, LIMITS)
    assert (book.block_tables == before).all()


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(1),
        StepPlan(1, decodes=(0, 3)),
        StepPlan(1, pages=(PageAssignment(2, 1, 39),), decodes=(2,)),
        StepPlan(1, prefills=(chunk(1, 70, 4, 5),), decodes=(0,)),
        StepPlan(1, prefills=(chunk(3, 99, 4),)),
        StepPlan(
            1, releases=(0,), starts=(start(0),), pages=(PageAssignment(0, 0, 0),), prefills=(chunk(0, 0, 4),)
        ),
        StepPlan(
            1,
            starts=(start(5),),
            pages=(PageAssignment(5, 0, 3), PageAssignment(5, 1, 4)),
            prefills=(chunk(5, 64, 4),),
        ),
        StepPlan(
            1, starts=(start(5, stop_token_ids=frozenset({1, 2, 10**6}), logit_bias={1: 1.0, 319: 2.0}),)
        ),
    ],
)
def test_a_proper_plan_passes(book: SlotBook, plan: StepPlan) -> None:
    """Rows of a sequence that has ended are proper: the caller may not know yet."""
    check_plan(plan, book, LIMITS)
