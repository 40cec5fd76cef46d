"""Sampling against a plain float64 account of the same rules, and the random stream against its paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.interface import Sampling
from engine.reference.ops.logprobs import token_logprobs
from engine.reference.ops.philox import philox4x32, uniform
from engine.reference.ops.sampling import apply_penalties, greedy, sample, top_ids
from engine.reference.sampler import Sampler

NOTHING = np.array([], np.int32)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert philox4x32(counter, key) == words


def test_draws_are_uniform_and_differ_by_seed_and_index() -> None:
    draws = np.array([[uniform(seed, index) for index in range(400)] for seed in (0, 1, 2**64 - 1)])
    assert len(np.unique(draws)) == draws.size
    assert draws.min() > 0
    assert draws.max() < 1
    counts = np.histogram(draws, bins=10, range=(0, 1))[0]
    assert np.all(np.abs(counts - 120) < 50)
    assert uniform(5, 2**32) != uniform(5, 0)
    assert uniform(2**32, 0) != uniform(0, 0)


def kept_by_the_rules(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """Ids that survive, ascending, and their weights: every rule written out in float64."""
    scaled = ((logits - logits.max()) / np.float32(temperature)).astype(np.float32)
    weights = np.exp(scaled).astype(np.float64)
    order = sorted(range(len(logits)), key=lambda i: (-scaled[i], i))
    if 0 < top_k < len(logits):
        order = order[:top_k]
    if top_p < 1:
        goal, total, kept = top_p * sum(weights[i] for i in order), 0.0, []
        for i in order:
            kept.append(i)
            total += weights[i]
            if total >= goal:
                break
        order = kept
    order = sorted(i for i in order if weights[i] >= min_p)
    return np.array(order), weights[order]


@given(
    data=st.data(),
    size=st.sampled_from([1, 2, 5, 300, 5000]),
    temperature=st.sampled_from([0.01, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 10_000]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    rounded=st.booleans(),
)
def test_sample_follows_the_rules(
    data: Any, size: int, temperature: float, top_k: int, top_p: float, min_p: float, rounded: bool
) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = (random.standard_normal(size) * 3).astype(np.float32)
    if rounded:  # many ties
        logits = np.round(logits)
    ids, weights = kept_by_the_rules(logits, temperature, top_k, top_p, min_p)
    edges = np.concatenate([[0.0], np.cumsum(weights)]) / weights.sum()
    for u in (1e-9, 0.25, 0.5, 0.75, 1 - 1e-9):
        token = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, uniform=u)
        assert token in ids
        place = int(np.searchsorted(ids, token))
        assert edges[place] - 1e-6 <= u <= edges[place + 1] + 1e-6


def test_frequencies_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    tokens = [
        sample(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=uniform(9, index))
        for index in range(4000)
    ]
    assert np.allclose(np.bincount(tokens, minlength=4) / 4000, [0.5, 0.3, 0.15, 0.05], atol=0.025)


def test_ties_go_to_the_lower_id() -> None:
    logits = np.array([1, 3, 3, 0, 3], np.float32)
    assert greedy(logits) == 1
    assert top_ids(logits, 2).tolist() == [1, 2]
    assert top_ids(logits, 4).tolist() == [1, 2, 4, 0]
    assert top_ids(logits, 9).tolist() == [1, 2, 4, 0, 3]
    for u in (0.01, 0.99):
        assert sample(logits, temperature=1, top_k=1, top_p=1, min_p=0, uniform=u) == 1
        assert sample(logits, temperature=1, top_k=0, top_p=0, min_p=0, uniform=u) == 1


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-3, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = np.array([0, 5, 4.9, -np.inf], np.float32)
    with np.errstate(all="ignore"):
        token = sample(logits, temperature=temperature, top_k=0, top_p=0.9, min_p=0.0, uniform=0.01)
    assert token == 1 or (temperature == 100.0 and token == 0)


def test_banned_tokens_are_never_drawn() -> None:
    logits = np.full(50, -np.inf, np.float32)
    logits[[3, 7]] = 0
    drawn = {
        sample(logits, temperature=1, top_k=40, top_p=1, min_p=0, uniform=u) for u in (1e-9, 0.3, 0.7, 0.999)
    }
    assert drawn == {3, 7}


def test_penalties() -> None:
    logits = np.array([2.0, -2.0, 2.0, -2.0, 1.0, 0.0], np.float32)
    in_prompt = np.array([True, True, False, False, False, False])
    counts = np.array([0, 0, 3, 1, 0, 0], np.int32)
    apply_penalties(logits, in_prompt, counts, repetition=2.0, presence=0.5, frequency=0.25)
    assert logits.tolist() == [1.0, -4.0, 1.0 - 0.5 - 0.75, -4.0 - 0.5 - 0.25, 1.0, 0.0]


def test_sampler_counts_prompt_and_output_as_a_resumed_one_does() -> None:
    """A sequence that goes on elsewhere from its output draws the same tokens as one that never stopped."""
    sampling = Sampling(
        temperature=0.8,
        top_p=0.9,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={3: 2.0, 5: -100.0},
        seed=2**63 + 11,
    )
    prompt = np.array([1, 2, 3], np.int32)
    rows = np.random.default_rng(0).standard_normal((30, 64)).astype(np.float32) * 2
    whole = Sampler(sampling, prompt, NOTHING, 64)
    tokens = [whole.next(row)[0] for row in rows]
    assert 5 not in tokens
    resumed = Sampler(sampling, prompt, np.array(tokens[:13], np.int32), 64)
    assert [resumed.next(row)[0] for row in rows[13:]] == tokens[13:]


def test_stop_tokens_wait_for_min_tokens() -> None:
    sampling = Sampling(temperature=0, stop_token_ids=frozenset({4, 900}), min_tokens=2)
    sampler = Sampler(sampling, NOTHING, NOTHING, 8)
    logits = np.arange(8, dtype=np.float32)
    logits[4] = 100
    assert [sampler.next(logits) for _ in range(3)] == [(7, False), (7, False), (4, True)]
    resumed = Sampler(sampling, NOTHING, np.array([7, 7], np.int32), 8)
    assert resumed.next(logits) == (4, True)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    logits = np.zeros(8, np.float32)
    logits[3] = bad
    with pytest.raises(ValueError, match="not finite"):
        Sampler(Sampling(temperature=0), NOTHING, NOTHING, 8).next(logits)


def test_nothing_left_to_sample_is_refused() -> None:
    sampling = Sampling(temperature=0, stop_token_ids=frozenset(range(8)), min_tokens=1)
    with pytest.raises(ValueError, match="no token to choose"):
        Sampler(sampling, NOTHING, NOTHING, 8).next(np.zeros(8, np.float32))


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = np.array([0.5, 2.0, -1.0, 2.0, 0.0], np.float32)
    exact = logits.astype(np.float64)
    wanted = exact - np.log(np.exp(exact).sum())
    entry = token_logprobs(logits, 3, 3)
    assert entry.rank == 2
    assert entry.logprob == pytest.approx(wanted[3], abs=1e-6)
    assert entry.top_ids == (1, 3, 0)
    assert entry.top_logprobs == pytest.approx([wanted[1], wanted[3], wanted[0]], abs=1e-6)
    assert token_logprobs(logits, 2, 0).top_ids == ()
    assert token_logprobs(logits, 2, 0).rank == 5
    biased = Sampler(Sampling(temperature=0, logprobs=1, logit_bias={2: 50.0}), NOTHING, NOTHING, 5)
    token, _ = biased.next(logits)
    entry = biased.logprobs(logits, token)
    assert entry is not None
    assert (token, entry.logprob) == (2, pytest.approx(wanted[2], abs=1e-6))
