"""What the service itself costs: gRPC, text, queues and scheduler, around an engine that costs nothing.

One front, one worker and the client share this machine. The simulated engine has the demo model's
vocabulary, so that detokenizing is real.
"""

from __future__ import annotations

from scripts.benchmark.figures import Figure
from scripts.benchmark.server import measure, serving
from service.cli.load import Load

MODEL = "smollm2-135m-instruct"
STREAMS = 64
STEP_US = 4000.0
"""A step of the paced run: 64 streams then offer 16,000 tokens/s."""

_FREE = ("--engine", "simulated", "--fronts", "1", "--max-sequences", str(STREAMS))
_THROUGHPUT = Load(streams=STREAMS, requests=8 * STREAMS, prompt_tokens=32, max_tokens=512)
_PACED = Load(streams=STREAMS, requests=STREAMS, prompt_tokens=32, max_tokens=512)
_ALONE = Load(streams=1, requests=300, prompt_tokens=32, max_tokens=16)
_WARM_UP = Load(streams=8, requests=32, prompt_tokens=32, max_tokens=64)


def run(repeats: int) -> list[Figure]:
    """Some ten seconds a repeat."""
    throughput, merged, alone, alone_p99 = [], [], [], []
    with serving(MODEL, *_FREE) as connection:
        measure(connection, _WARM_UP)
        for _ in range(repeats):
            summary = measure(connection, _THROUGHPUT)
            throughput.append(summary.tokens_per_s)
            merged.append(summary.tokens / summary.messages)
            summary = measure(connection, _ALONE)
            assert summary.first_token_ms is not None
            alone.append(summary.first_token_ms.p50)
            alone_p99.append(summary.first_token_ms.p99)
    pace, pace_p99 = [], []
    with serving(MODEL, *_FREE, "--simulated-step-us", str(STEP_US)) as connection:
        measure(connection, _WARM_UP)
        for _ in range(repeats):
            summary = measure(connection, _PACED)
            assert summary.inter_token_ms is not None
            pace.append(STEP_US / 10 / summary.inter_token_ms.mean)
            pace_p99.append(summary.inter_token_ms.p99)
    return [
        Figure(
            f"tokens through gRPC, {STREAMS} streams, engine free of cost",
            "tokens/s",
            tuple(throughput),
            at_least=25_000,
            note=f"{_THROUGHPUT.requests} requests of 32 + 512 tokens, client included",
        ),
        Figure("tokens in one message, then", "tokens", tuple(merged)),
        Figure(
            "time to first token, 1 stream, p50",
            "ms",
            tuple(alone),
            at_most=2.0,
            note="all of it the service's",
        ),
        Figure("time to first token, 1 stream, p99", "ms", tuple(alone_p99)),
        Figure(
            f"pace kept, {STREAMS} streams, steps of {STEP_US / 1e3:g} ms",
            "% of the engine's",
            tuple(pace),
            note=f"offers {STREAMS / STEP_US * 1e6:,.0f} tokens/s",
        ),
        Figure("time between tokens, then, p99", "ms", tuple(pace_p99)),
    ]
