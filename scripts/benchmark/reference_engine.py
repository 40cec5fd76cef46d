"""The numpy engine with the demo model, through gRPC: how fast a machine without a GPU answers."""

from __future__ import annotations

from scripts.benchmark.figures import Figure
from scripts.benchmark.server import measure, serving
from service.cli.load import Load, Summary

MODEL = "smollm2-135m-instruct"
PROMPT, TOKENS = 32, 64


def run(repeats: int) -> list[Figure]:
    """About a minute a repeat on two cores."""
    single, batch, first = [], [], []
    with serving(MODEL, "--engine", "reference", "--max-sequences", "8") as connection:
        measure(connection, Load(streams=1, requests=1, prompt_tokens=PROMPT, max_tokens=4))
        for repeat in range(repeats):
            summary = measure(connection, _load(1, repeat))
            assert summary.first_token_ms is not None
            first.append(summary.first_token_ms.p50)
            single.append(_decode_rate(summary, 1))
            batch.append(_decode_rate(measure(connection, _load(8, repeat)), 8))
    ratio = [eight / one for one, eight in zip(single, batch, strict=True)]
    return [
        Figure(
            "decode, batch 1", "tokens/s", tuple(single), at_least=8.0, note=f"{PROMPT} + {TOKENS} tokens"
        ),
        Figure("decode, batch 8, in all", "tokens/s", tuple(batch)),
        Figure("batch 8 over batch 1", "×", tuple(ratio), at_least=3.0),
        Figure(f"time to first token, {PROMPT} prompt tokens, p50", "ms", tuple(first)),
    ]


def _load(streams: int, repeat: int) -> Load:
    """Other prompts each time, so that no prefix is cached."""
    return Load(streams=streams, requests=streams, prompt_tokens=PROMPT, max_tokens=TOKENS, seed=repeat)


def _decode_rate(summary: Summary, streams: int) -> float:
    """Tokens/s of all streams together, prefill left out."""
    assert summary.inter_token_ms is not None
    return streams * 1e3 / summary.inter_token_ms.mean
