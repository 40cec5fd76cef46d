"""How one sequence's tokens are chosen: its penalties, its random stream, its stops. Knows no slot."""

from __future__ import annotations

import numpy as np

from engine.interface import Sampling, TokenLogprobs
from engine.reference.arrays import FloatArray, IntArray
from engine.reference.ops.logprobs import token_logprobs
from engine.reference.ops.philox import uniform
from engine.reference.ops.sampling import apply_bias, apply_penalties, greedy, sample


class Sampler:
    """One sequence's sampling state. Bytes for counting tokens are held only if a penalty needs them."""

    def __init__(self, sampling: Sampling, prompt: IntArray, output: IntArray, vocab_size: int) -> None:
        self.sampling = sampling
        self._n_output = len(output)
        self._stop_ids = np.array([i for i in sampling.stop_token_ids if 0 <= i < vocab_size], np.intp)
        self._penalised = (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )
        if self._penalised:
            self._in_prompt = np.zeros(vocab_size, np.bool_)
            self._in_prompt[prompt.astype(np.intp)] = True
            self._output_counts = np.bincount(output.astype(np.intp), minlength=vocab_size).astype(np.int32)

    def next(self, logits: FloatArray) -> tuple[int, bool]:
        """The next token for raw float32 [vocab], and whether it stops the sequence; takes it as output.

        Raises ValueError if there is nothing to choose from: a logit is NaN or +inf, or all are −inf.
        """
        peak = np.max(logits)
        if not np.isfinite(peak):
            raise ValueError("the logits are not finite")
        processed = self._process(logits)
        if processed is not logits and not np.isfinite(np.max(processed)):
            raise ValueError("penalties, bias and min_tokens leave no token to choose from")
        choice = self.sampling
        token = (
            greedy(processed)
            if choice.temperature == 0.0
            else sample(
                processed,
                temperature=choice.temperature,
                top_k=choice.top_k,
                top_p=choice.top_p,
                min_p=choice.min_p,
                uniform=uniform(choice.seed, self._n_output),
            )
        )
        self._n_output += 1
        if self._penalised:
            self._output_counts[token] += 1
        return token, token in choice.stop_token_ids

    def logprobs(self, logits: FloatArray, token: int) -> TokenLogprobs | None:
        """What the raw logits say of `token`, if the sequence asked for it."""
        if self.sampling.logprobs is None:
            return None
        return token_logprobs(logits, token, self.sampling.logprobs)

    def _process(self, logits: FloatArray) -> FloatArray:
        """Penalties, bias and the ban on early stops; the same array where there is nothing to do."""
        too_early = self._n_output < self.sampling.min_tokens and len(self._stop_ids) > 0
        if not (self._penalised or self.sampling.logit_bias or too_early):
            return logits
        processed = logits.copy()
        if self._penalised:
            apply_penalties(
                processed,
                self._in_prompt,
                self._output_counts,
                repetition=self.sampling.repetition_penalty,
                presence=self.sampling.presence_penalty,
                frequency=self.sampling.frequency_penalty,
            )
        apply_bias(processed, self.sampling.logit_bias)
        if too_early:
            processed[self._stop_ids] = -np.inf
        return processed
