"""All programs of a model: decode by width, prefill by size, first tokens, prompt log-probabilities.

Each is built when first asked for, or before serving by `capture_all`. Knows no plan and no slot's sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.cuda.device import Stream
from engine.cuda.gemm import GemmKey
from engine.cuda.graphs import Eager, Graph, Runnable, Runs
from engine.cuda.memory import Arena
from engine.cuda.program import (
    Body,
    Call,
    DecodeRows,
    KeyCollector,
    Parts,
    PrefillRows,
    distinct_layers,
    head_key,
)
from engine.cuda.sampling import Tail
from engine.cuda.work import SampleKey


class Programs:
    """Of one stream."""

    def __init__(
        self,
        parts: Parts,
        results: Arena,
        stream: Stream,
        *,
        widths: Sequence[int],
        sizes: Sequence[int],
        graphs: bool,
    ) -> None:
        """results: the results region on the device. graphs: replay graphs, or else launch every kernel."""
        self.parts = parts
        self.results = results
        self._stream = stream
        self._widths = widths
        self._sizes = sizes
        self._replayed = Graph if graphs else Eager
        self.decode: Runs[SampleKey] = Runs(self._make_decode)
        """A whole decode step."""
        self.prefill: Runs[int] = Runs(self._make_prefill)
        """A prefill pass up to the last layer."""
        self.first_tokens: Runs[SampleKey] = Runs(self._make_first_tokens)
        """Final norm, head and sampling of the rows that end a prompt. Few launches, many keys: no graphs."""
        self.prompt_logprobs: Runs[int] = Runs(self._make_prompt_logprobs)
        """One group of prompt tokens."""

    def capture_all(self, progress: Callable[[float], None]) -> None:
        """Makes what serving needs at once; log-probabilities are captured when first asked for."""
        keys = [SampleKey(width, greedy, False) for width in self._widths for greedy in (True, False)]
        total = len(self._sizes) + len(keys)
        for done, size in enumerate(self._sizes, start=1):
            self.prefill.make(size)
            progress(done / total)
        for done, key in enumerate(keys, start=len(self._sizes) + 1):
            self.decode.make(key)
            self.first_tokens.make(key)
            progress(done / total)

    def close(self) -> None:
        for runs in (self.decode, self.prefill, self.first_tokens, self.prompt_logprobs):
            runs.close()

    def _make_decode(self, key: SampleKey) -> Runnable:
        body = Body(self.parts, DecodeRows(self.parts, key.width))
        calls: list[Call] = [*body.calls, *self._tail(body.leaves_delta).decode(key)]
        return self._replayed(self._stream, calls)

    def _make_prefill(self, size: int) -> Runnable:
        return self._replayed(self._stream, Body(self.parts, PrefillRows(self.parts, size)).calls)

    def _make_first_tokens(self, key: SampleKey) -> Runnable:
        return Eager(self._stream, self._tail(self._leaves_delta).first_tokens(key))

    def _make_prompt_logprobs(self, group: int) -> Runnable:
        return Eager(self._stream, self._tail(self._leaves_delta).prompt_logprobs(group))

    def _tail(self, adds_delta: bool) -> Tail:
        return Tail(self.parts, self.results, adds_delta=adds_delta)

    @property
    def _leaves_delta(self) -> bool:
        return self.parts.weights.layers[-1].feed_forward.down.bias is not None


def product_keys(parts: Parts, widths: Sequence[int], sizes: Sequence[int]) -> list[GemmKey]:
    """Every matrix product that the programs leave to cuBLASLt, each once: learnt by building them."""
    collector = KeyCollector()
    parts = replace(distinct_layers(parts), planner=collector)
    for width in widths:
        Body(parts, DecodeRows(parts, width))
    for size in sizes:
        Body(parts, PrefillRows(parts, size))
    heads = dict.fromkeys((*widths, parts.buffers.plan.sizes.logit_rows))
    return [*collector.keys, *(head_key(count, parts.config) for count in heads)]
