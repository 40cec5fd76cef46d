"""What a simulated model "thinks": every token is a pure function of all before it, the seed and its index.

So whatever happens to a sequence (chunking, preemption, another worker), its tokens stay the same,
and a wrong prefix shows in the very next token.
"""

from __future__ import annotations

import numpy as np

from engine.interface import IntArray, Sampling, TokenLogprobs

MASK = 2**64 - 1
MULTIPLIER = 6_364_136_223_846_793_005
SEED_FACTOR = 0x9E37_79B9_7F4A_7C15
INDEX_FACTOR = 0xD1B5_4A32_D192_ED03
MIXER = 0xFF51_AFD7_ED55_8CCD

_BLOCK = 1024
_POWERS = np.multiply.accumulate(np.full(_BLOCK, MULTIPLIER, np.uint64), dtype=np.uint64)
"""MULTIPLIER ** (1 … _BLOCK), modulo 2⁶⁴."""


def advance(state: int, token: int) -> int:
    """The state after one token more; a polynomial in MULTIPLIER modulo 2⁶⁴ over all tokens so far."""
    return (state * MULTIPLIER + token + 1) & MASK


def advance_all(state: int, tokens: IntArray) -> int:
    """The state after all these tokens, int32 [n]."""
    for start in range(0, len(tokens), _BLOCK):
        block = tokens[start : start + _BLOCK].astype(np.uint64) + np.uint64(1)
        n = len(block)
        tail = int((block[:-1] * _POWERS[n - 2 :: -1]).sum(dtype=np.uint64)) if n > 1 else 0
        state = (state * int(_POWERS[n - 1]) + tail + int(block[-1])) & MASK
    return state


def draw(state: int, seed: int, index: int) -> int:
    """Number, 0 … 2³² − 1, for output token `index` after the tokens that `state` stands for."""
    mixed = (state ^ (seed * SEED_FACTOR + index * INDEX_FACTOR)) & MASK
    return ((mixed ^ mixed >> 32) * MIXER & MASK) >> 32


def choose(
    state: int, sampling: Sampling, index: int, token_ids: tuple[int, ...] | range, stop_one_in: int
) -> int:
    """Output token `index`."""
    number = draw(state, sampling.seed, index)
    stops = sampling.stop_token_ids
    may_stop = index >= sampling.min_tokens
    if stop_one_in and stops and may_stop and number // len(token_ids) % stop_one_in == 0:
        return min(stops)
    token = token_ids[number % len(token_ids)]
    while token in stops and not may_stop:
        number += 1
        token = token_ids[number % len(token_ids)]
    return token


def logprobs_at(state: int, token: int, alternatives: int, vocab_size: int) -> TokenLogprobs:
    """Invented, but a function of nothing but the tokens before, the token and what was asked."""
    number = draw(state, token, 0)
    return TokenLogprobs(
        logprob=-(number % 4096) / 256,
        rank=1 + number % vocab_size,
        top_ids=tuple((number + i) % vocab_size for i in range(alternatives)),
        top_logprobs=tuple(-(i + 1) / 8 for i in range(alternatives)),
    )
