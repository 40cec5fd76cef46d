"""What a client sees of many streams at once: every message with its time, and rates out of them.

Two rates: of the whole run, from the first request to the last token; and of the steady window, in which
every stream is under way, from the last stream's first token to the first stream's end. The first holds
prompts and ramp, the second neither. Knows no engine.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from protos.slipstream.v1.inference_pb2 import GenerateRequest, GetModelInfoRequest, TokenIds
from protos.slipstream.v1.sampling_pb2 import SamplingParams
from service.cli.connection import Connection, inference

FIRST_ORDINARY = 3
"""Token ids below it are special."""


@dataclass(slots=True)
class Watched:
    """One stream: when its messages came, in seconds, and how many tokens each held."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Run:
    """All streams of one run."""

    started: float
    streams: Sequence[Watched]

    def whole_rate(self) -> float:
        """Tokens/s from the first request to the last token."""
        end = max(stream.times[-1] for stream in self.streams)
        return sum(stream.tokens for stream in self.streams) / (end - self.started)

    def steady_rate(self) -> float:
        """Tokens/s of the steady window. Raises ValueError if the streams were never all under way."""
        begin = max(stream.times[0] for stream in self.streams)
        end = min(stream.times[-1] for stream in self.streams)
        if end <= begin:
            raise ValueError("a stream ended before another began: there is no steady window")
        inside = sum(
            count
            for stream in self.streams
            for at, count in zip(stream.times, stream.counts, strict=True)
            if begin < at <= end
        )
        return inside / (end - begin)


def watch(connection: Connection, streams: int, prompt_tokens: int, tokens: int, seed: int) -> Run:
    """`streams` greedy requests at once, with random prompts. Raises grpc.RpcError, and RuntimeError if an
    answer is not of so many tokens."""
    return asyncio.run(_watch(connection, streams, prompt_tokens, tokens, seed))


async def _watch(connection: Connection, streams: int, prompt_tokens: int, tokens: int, seed: int) -> Run:
    draw = random.Random(seed)
    async with connection.open_async() as channel:
        stub, metadata = inference(channel), connection.metadata()
        info = await stub.GetModelInfo(GetModelInfoRequest(), metadata=metadata)
        vocabulary = range(FIRST_ORDINARY, info.vocab_size)
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        requests = [
            GenerateRequest(tokens=TokenIds(ids=draw.choices(vocabulary, k=prompt_tokens)), sampling=sampling)
            for _ in range(streams)
        ]
        started = time.perf_counter()
        run = Run(started, await asyncio.gather(*(_one(stub, request, metadata) for request in requests)))
    short = [stream.tokens for stream in run.streams if stream.tokens != tokens]
    if short:
        raise RuntimeError(f"{len(short)} answers are not of {tokens} tokens: {short[:4]}")
    return run


async def _one(stub: Any, request: GenerateRequest, metadata: Any) -> Watched:
    watched = Watched()
    async for message in stub.Generate(request, metadata=metadata):
        if message.token_ids:
            watched.times.append(time.perf_counter())
            watched.counts.append(len(message.token_ids))
    return watched
