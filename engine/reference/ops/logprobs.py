"""Log-probabilities of one row of raw logits. Knows no slot and no sequence."""

from __future__ import annotations

import math

import numpy as np

from engine.interface import TokenLogprobs
from engine.reference.arrays import FloatArray
from engine.reference.ops.sampling import top_ids


def token_logprobs(logits: FloatArray, token: int, alternatives: int) -> TokenLogprobs:
    """What float32 [vocab] says of `token` and of the `alternatives` most likely ones.

    The normaliser is summed in float64. rank counts the tokens before it, ties by lower id.
    """
    peak = np.max(logits)
    total = float(np.sum(np.exp(logits - peak), dtype=np.float64))
    normaliser = float(peak) + math.log(total)
    own = logits[token]
    before = np.count_nonzero(logits > own) + np.count_nonzero(logits[:token] == own)
    top = top_ids(logits, alternatives)
    return TokenLogprobs(
        logprob=float(own) - normaliser,
        rank=int(before) + 1,
        top_ids=tuple(top.tolist()),
        top_logprobs=tuple(float(logits[i]) - normaliser for i in top),
    )
