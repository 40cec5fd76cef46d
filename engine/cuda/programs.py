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
from engine.cuda.owned import Owned
from engine.cuda.parts import KeyCollector, Parts, distinct_layers
from engine.cuda.program import final_norm, pass_to_last_attention, rest_of_last_layer, whole_pass
from engine.cuda.rows import DecodeRows, PrefillRows
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
        """A prefill pass up to the last layer's attention."""
        self.first_tokens: Runs[SampleKey] = Runs(self._make_first_tokens)
        """The rest, for the rows that end a prompt. Few launches, many keys: no graphs."""
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
        with Owned() as made:
            for runs in (self.decode, self.prefill, self.first_tokens, self.prompt_logprobs):
                made.add(runs)

    def _make_decode(self, key: SampleKey) -> Runnable:
        products = whole_pass(self.parts, DecodeRows(self.parts, key.width, long=key.long))
        return self._replayed(self._stream, self._tail.decode(products, key))

    def _make_prefill(self, size: int) -> Runnable:
        return self._replayed(self._stream, pass_to_last_attention(self.parts, PrefillRows(self.parts, size)))

    def _make_first_tokens(self, key: SampleKey) -> Runnable:
        return Eager(self._stream, self._tail.first_tokens(key))

    def _make_prompt_logprobs(self, group: int) -> Runnable:
        return Eager(self._stream, self._tail.prompt_logprobs(group))

    @property
    def _tail(self) -> Tail:
        return Tail(self.parts, self.results)


def product_keys(parts: Parts, widths: Sequence[int], sizes: Sequence[int]) -> list[GemmKey]:
    """Every matrix product that the programs leave to cuBLASLt, each once: learnt by building them."""
    collector = KeyCollector()
    parts = replace(distinct_layers(parts), planner=collector)
    chosen = parts.staging.tensor("prompt_rows").rows(0, parts.buffers.plan.sizes.logit_rows)
    with_head = [whole_pass(parts, DecodeRows(parts, width)) for width in widths]
    for products in (*with_head, rest_of_last_layer(parts, chosen)):
        logits = parts.buffers.logits.logits.rows(0, products.rows)
        products.head(final_norm(parts), parts.weights.head, logits)
    for size in sizes:
        whole_pass(parts, PrefillRows(parts, size))
    return list(collector.keys)
