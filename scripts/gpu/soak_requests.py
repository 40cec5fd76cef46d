"""What a soak sends: subjects, each a prompt with its own way of sampling, and how each call is to end.

A subject's answer is known from having been asked alone, so every token of every stream can be told from any
other stream's. Knows no server.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from protos.slipstream.v1.inference_pb2 import GenerateRequest, GetModelInfoResponse, TokenIds
from protos.slipstream.v1.sampling_pb2 import SamplingParams

PAGE_EDGES = (63, 64, 65, 127, 128, 129)
SHARED_PREFIX = 130
"""Tokens, two pages and a little, that every fourth subject begins with: prefix hits among strangers."""
TOP_K = 8
"""Of all that is drawn: a token outside of the likeliest few is a wrong one."""
BOS, FIRST_ORDINARY = 1, 3
MOST_LOGIT = 8.0
"""Of random weights: the likeliest of 152 k tokens has 4.5 times the logits' spread, which is about 0.9."""


class Ending(StrEnum):
    """How a call ends."""

    WHOLE = "whole"
    CANCELLED = "cancelled by the client"
    ABORTED = "aborted by id"
    DEADLINE = "ended by its deadline"
    CUT = "connection cut"


ENDINGS = {
    Ending.WHOLE: 70,
    Ending.CANCELLED: 10,
    Ending.ABORTED: 8,
    Ending.DEADLINE: 7,
    Ending.CUT: 5,
}
"""Percent."""


@dataclass(slots=True)
class Subject:
    """A prompt, how it is to be continued, and what came of it when it was alone."""

    prompt: list[int]
    sampling: SamplingParams
    top_k: int
    """How many of the likeliest tokens it is drawn from; 1: greedy."""
    answer: list[int] = field(default_factory=list)

    def allowance(self, seen: Mapping[int, int]) -> float:
        """Nats by which penalties may have put a token before likelier ones, after the output `seen`."""
        repetition = MOST_LOGIT * max(self.sampling.repetition_penalty - 1, 0.0)
        return self.sampling.frequency_penalty * max(seen.values(), default=0) + repetition

    def request(self, request_id: str, priority: int = 0) -> GenerateRequest:
        return GenerateRequest(
            request_id=request_id,
            tokens=TokenIds(ids=self.prompt),
            sampling=self.sampling,
            priority=priority,
        )


@dataclass(frozen=True, slots=True)
class Call:
    """One request of the soak."""

    number: int
    subject: Subject
    ending: Ending
    after_messages: int
    """The client ends it once it has seen so many."""
    deadline_s: float
    priority: int


def make_subjects(
    info: GetModelInfoResponse, count: int, seed: int, longest_prompt: int, most_tokens: int
) -> list[Subject]:
    """`count` subjects of mixed lengths and sampling, the same for the same arguments."""
    draw = random.Random(seed)
    vocabulary = range(FIRST_ORDINARY, info.vocab_size)
    room = info.max_sequence_length - 1
    longest_prompt = min(longest_prompt, room - 2)
    shared = draw.choices(vocabulary, k=SHARED_PREFIX)
    subjects = []
    for number in range(count):
        kind = number % 4
        length = min(_prompt_length(draw, longest_prompt), longest_prompt)
        prompt = draw.choices(vocabulary, k=length)
        if kind == 3 and SHARED_PREFIX + length <= longest_prompt:
            prompt = shared + prompt
        prompt = [BOS, *prompt]
        tokens = min(_answer_length(draw, most_tokens), room - len(prompt))
        subjects.append(Subject(prompt, *_sampling(draw, number, tokens)))
    return subjects


def make_calls(subjects: list[Subject], count: int, seed: int) -> Iterator[Call]:
    """`count` calls, each of a random subject; endings in the shares of ENDINGS."""
    draw = random.Random(seed)
    endings = draw.choices(list(ENDINGS), list(ENDINGS.values()), k=count)
    for number, ending in enumerate(endings):
        yield Call(
            number,
            draw.choice(subjects),
            ending,
            after_messages=draw.choice((0, 0, 1, 1, 2, 4, 8)),
            deadline_s=draw.choice((0.0005, 0.002, 0.01, 0.05, 0.2)),
            priority=draw.choice((-1, 0, 0, 0, 1)),
        )


def _prompt_length(draw: random.Random, longest: int) -> int:
    match draw.randrange(10):
        case 0:
            return draw.randint(1, 3)
        case 1 | 2:
            return draw.choice(PAGE_EDGES)
        case 3:
            return draw.randint(longest // 2, longest)
        case 4 | 5:
            return draw.randint(130, 400)
    return draw.randint(4, 120)


def _answer_length(draw: random.Random, most: int) -> int:
    match draw.randrange(10):
        case 0:
            return 1
        case 1 | 2:
            return draw.randint(most // 2, most)
        case 3 | 4 | 5:
            return draw.randint(17, 64)
    return draw.randint(2, 16)


def _sampling(draw: random.Random, number: int, tokens: int) -> tuple[SamplingParams, int]:
    """Half greedy, half drawn; and from how many of the likeliest. All have a seed: the simulated
    engine's tokens hang on it though they be greedy."""
    common = {"max_tokens": tokens, "ignore_eos": draw.random() < 0.5, "seed": draw.getrandbits(63)}
    match number % 8:
        case 1:
            drawn = {"temperature": 1.0, "top_k": TOP_K}
        case 3:
            drawn = {"temperature": 0.7, "top_k": TOP_K, "top_p": 0.9}
        case 5:
            drawn = {"temperature": 1.3, "top_k": TOP_K, "min_p": 0.02, "logprobs": 3}
        case 7:
            drawn = {"temperature": 1.0, "top_k": TOP_K, "frequency_penalty": 0.1, "repetition_penalty": 1.02}
            return SamplingParams(**common, **drawn), TOP_K
        case 4:
            return SamplingParams(**common, temperature=0.0, logprobs=0), 1
        case _:
            return SamplingParams(**common, temperature=0.0), 1
    return SamplingParams(**common, **drawn), TOP_K
