"""SamplingParams: every field against its stated limits, and the model's defaults for what is left out.

The limits are those of the comments in sampling.proto. Knows no prompt; whoever does gives its length.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protos.slipstream.v1 import sampling_pb2
from service.rpc.violations import Range, Violations
from worker.client import MAX_LOGPROBS, GenerationDefaults, Sampling

MAX_STOP_STRINGS = 64
MAX_STOP_BYTES = 1024
MAX_STOP_TOKENS = 64
MAX_BIASES = 1024
MAX_ANSWERS = 128

RANGES = {
    "max_tokens": Range(1),
    "temperature": Range(0, 100),
    "top_p": Range(0, 1, is_low_open=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(1e-6, 10),  # logits divided by less leave the range of float32
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "n": Range(1, MAX_ANSWERS),
    "logprobs": Range(0, MAX_LOGPROBS),
    "prompt_logprobs": Range(0, MAX_LOGPROBS),
}
BIAS_RANGE = Range(-100, 100)


PROTOCOL_DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""What an unset field means where the model states nothing else."""


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """What the served model brings to the resolution of sampling parameters."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    max_new_tokens: int | None
    """Default of max_tokens, where the model states one."""
    unset: Mapping[str, Any]
    """The values of unset fields, by name: all of PROTOCOL_DEFAULTS' keys."""

    @classmethod
    def of(
        cls, vocab_size: int, eos_token_ids: Iterable[int], defaults: GenerationDefaults
    ) -> SamplingLimits:
        stated = {name: getattr(defaults, name) for name in PROTOCOL_DEFAULTS}
        unset = PROTOCOL_DEFAULTS | {name: value for name, value in stated.items() if value is not None}
        return cls(vocab_size, frozenset(eos_token_ids), defaults.max_new_tokens, unset)


def check_sampling(params: sampling_pb2.SamplingParams, vocab_size: int, violations: Violations) -> None:
    """Reports each field out of its limits, under "sampling"."""
    for name, allowed in RANGES.items():
        if params.HasField(name):
            allowed.check(f"sampling.{name}", getattr(params, name), violations)
    if params.HasField("max_tokens") and params.min_tokens > params.max_tokens:
        description = f"is {params.min_tokens}; must not exceed max_tokens, {params.max_tokens}"
        violations.add("sampling.min_tokens", description)
    if params.logit_bias:
        _check_logit_bias(params, vocab_size, violations)
    if params.stop:
        _check_stop_strings(params, violations)
    if params.stop_token_ids:
        check_count("sampling.stop_token_ids", len(params.stop_token_ids), MAX_STOP_TOKENS, violations)
        check_token_ids("sampling.stop_token_ids", params.stop_token_ids, vocab_size, violations)


def check_count(path: str, count: int, limit: int, violations: Violations) -> None:
    if count > limit:
        violations.add(path, f"has {count} entries; at most {limit} are allowed")


def check_token_ids(path: str, ids: Sequence[int], vocab_size: int, violations: Violations) -> None:
    """One pass in C when all is well, however many there are."""
    if not ids or max(ids) < vocab_size:
        return
    for i, token_id in enumerate(ids):
        if token_id >= vocab_size:
            violations.add(f"{path}[{i}]", f"is {token_id}; the vocabulary ends at {vocab_size - 1}")
            if violations.is_full:
                return


def _check_logit_bias(params: sampling_pb2.SamplingParams, vocab_size: int, violations: Violations) -> None:
    check_count("sampling.logit_bias", len(params.logit_bias), MAX_BIASES, violations)
    for token_id, bias in params.logit_bias.items():
        path = f"sampling.logit_bias[{token_id}]"
        BIAS_RANGE.check(path, bias, violations)
        if token_id >= vocab_size:
            violations.add(path, f"names token {token_id}; the vocabulary ends at {vocab_size - 1}")
        if violations.is_full:
            return


def _check_stop_strings(params: sampling_pb2.SamplingParams, violations: Violations) -> None:
    check_count("sampling.stop", len(params.stop), MAX_STOP_STRINGS, violations)
    for i, stop in enumerate(params.stop):
        size = len(stop.encode())
        if size == 0:
            violations.add(f"sampling.stop[{i}]", "is empty")
        elif size > MAX_STOP_BYTES:
            description = f"has {size} bytes; at most {MAX_STOP_BYTES} are allowed"
            violations.add(f"sampling.stop[{i}]", description)
        if violations.is_full:
            return


def resolve_sampling(params: sampling_pb2.SamplingParams, limits: SamplingLimits) -> Sampling:
    """Checked parameters with every field set: the request's, else the model's, else the protocol's."""
    values = {
        name: getattr(params, name) if params.HasField(name) else unset
        for name, unset in limits.unset.items()
    }
    if values["top_k"] >= limits.vocab_size:
        values["top_k"] = 0
    stop_ids = frozenset(params.stop_token_ids)
    return Sampling(
        **values,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        seed=params.seed if params.HasField("seed") else random.getrandbits(64),
        stop_token_ids=stop_ids if params.ignore_eos else stop_ids | limits.eos_token_ids,
        min_tokens=params.min_tokens,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
    )


def resolve_max_tokens(
    params: sampling_pb2.SamplingParams, limits: SamplingLimits, room: int, violations: Violations
) -> int:
    """Most tokens to generate, where `room` (at least 1) is left after the prompt.

    A request for more than fits ends at the end of the context, as its finish reason says; a min_tokens
    that cannot be reached is reported.
    """
    if params.min_tokens > room:
        description = f"is {params.min_tokens}; only {room} tokens fit after the prompt"
        violations.add("sampling.min_tokens", description)
    if params.HasField("max_tokens"):
        return min(params.max_tokens, room)
    return min(max(limits.max_new_tokens or room, params.min_tokens), room)


def default_sampling(limits: SamplingLimits) -> sampling_pb2.SamplingParams:
    """What unset fields mean for the model, for GetModelInfo."""
    return sampling_pb2.SamplingParams(
        **limits.unset,
        max_tokens=limits.max_new_tokens,
        min_tokens=0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        ignore_eos=False,
        include_stop=False,
        n=1,
        echo=False,
    )
