"""A load generator: many streams against a running server, and what they saw.

Prompts are random token ids, so that no two share a cached prefix unless asked to. All times are the
client's own, in seconds.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from protos.slipstream.v1.inference_pb2 import GenerateRequest, GetModelInfoRequest, TokenIds
from protos.slipstream.v1.sampling_pb2 import SamplingParams
from service.cli.connection import Connection, inference

if TYPE_CHECKING:
    from protos.slipstream.v1.inference_pb2_grpc import InferenceStub


@dataclass(frozen=True, slots=True)
class Load:
    """What to send."""

    streams: int
    """Requests in flight at once."""
    requests: int
    prompt_tokens: int
    max_tokens: int
    shared_prefix: int = 0
    """Tokens that all prompts begin with."""
    temperature: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class Observed:
    """What the streams saw. The lists run over all requests."""

    first_token_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """Between messages: the time per token in it, and how many tokens it held."""
    tokens: int = 0
    messages: int = 0
    cached_tokens: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run."""

    load: Load
    completed: int
    errors: dict[str, int]
    elapsed_s: float
    tokens: int
    messages: int
    cached_tokens: int
    tokens_per_s: float
    requests_per_s: float
    first_token_ms: Percentiles | None
    inter_token_ms: Percentiles | None
    total_ms: Percentiles | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def run_load(connection: Connection, load: Load, on_done: Callable[[], None] = lambda: None) -> Summary:
    """Runs the load to its end; `on_done` is called after each request. Raises grpc.RpcError only if the
    server cannot be asked about its model; failures of single requests are counted."""
    observed = Observed()
    async with connection.open_async() as channel:
        stub = inference(channel)
        info = await stub.GetModelInfo(GetModelInfoRequest(), metadata=connection.metadata())
        requests = iter(_requests(load, info.vocab_size))
        started = time.perf_counter()

        async def stream() -> None:
            for request in requests:
                await _run_one(stub, request, connection.metadata(), observed)
                on_done()

        await asyncio.gather(*(stream() for _ in range(min(load.streams, load.requests))))
        observed.elapsed_s = time.perf_counter() - started
    return summarize(load, observed)


def _requests(load: Load, vocab_size: int) -> Sequence[GenerateRequest]:
    """Made before the clock starts."""
    draw = random.Random(load.seed)
    shared = draw.choices(range(vocab_size), k=load.shared_prefix)
    sampling = SamplingParams(max_tokens=load.max_tokens, temperature=load.temperature, ignore_eos=True)
    own = max(0, load.prompt_tokens - load.shared_prefix)
    return [
        GenerateRequest(
            tokens=TokenIds(ids=[*shared, *draw.choices(range(vocab_size), k=own)]), sampling=sampling
        )
        for _ in range(load.requests)
    ]


async def _run_one(
    stub: InferenceStub, request: GenerateRequest, metadata: tuple[tuple[str, str], ...], observed: Observed
) -> None:
    now = time.perf_counter
    started = last = now()
    seen = cached = 0
    try:
        async for message in stub.Generate(request, metadata=metadata):
            observed.messages += 1
            count = len(message.token_ids)
            if not count:
                continue
            at = now()
            if seen:
                observed.gaps.append(((at - last) / count, count))
            else:
                observed.first_token_s.append(at - started)
                cached = message.usage.cached_tokens
            last = at
            seen += count
    except grpc.RpcError as error:
        name = error.code().name
        observed.errors[name] = observed.errors.get(name, 0) + 1
    else:
        observed.total_s.append(now() - started)
    observed.tokens += seen
    observed.cached_tokens += cached


def summarize(load: Load, observed: Observed) -> Summary:
    """The figures of what was observed."""
    elapsed = observed.elapsed_s
    return Summary(
        load=load,
        completed=len(observed.total_s),
        errors=observed.errors,
        elapsed_s=elapsed,
        tokens=observed.tokens,
        messages=observed.messages,
        cached_tokens=observed.cached_tokens,
        tokens_per_s=observed.tokens / elapsed if elapsed else 0.0,
        requests_per_s=len(observed.total_s) / elapsed if elapsed else 0.0,
        first_token_ms=percentiles([(value, 1) for value in observed.first_token_s]),
        inter_token_ms=percentiles(observed.gaps),
        total_ms=percentiles([(value, 1) for value in observed.total_s]),
    )


def percentiles(weighted: Sequence[tuple[float, int]]) -> Percentiles | None:
    """Of values in seconds that each stand for `weight` equal ones; None of nothing."""
    if not weighted:
        return None
    ordered = sorted(weighted)
    total = sum(weight for _, weight in ordered)
    mean = statistics.fmean([value for value, _ in ordered], [weight for _, weight in ordered])

    def at(share: float) -> float:
        left = share * total
        for value, weight in ordered:
            left -= weight
            if left <= 0:
                return value * 1e3
        return ordered[-1][0] * 1e3

    return Percentiles(mean * 1e3, at(0.5), at(0.9), at(0.99))
