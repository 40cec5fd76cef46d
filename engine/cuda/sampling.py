"""From the residual stream to sampled tokens and log-probabilities: the calls behind a pass.

Knows rows and slots, no layer. Results land in the results region, one group per kind of row.
"""

from __future__ import annotations

from engine.cuda.buffers import part
from engine.cuda.memory import Arena, Layout
from engine.cuda.parts import Call, Parts
from engine.cuda.products import Products
from engine.cuda.program import final_norm, rest_of_last_layer
from engine.cuda.regions import Region
from engine.cuda.work import SampleKey
from kernels.logprobs import MAX_ALTERNATIVES, LogprobOutputs, token_logprobs
from kernels.sampling import sample
from kernels.tensor import DType, Tensor

GROUPS = ("first", "decode", "prompt")
"""Rows that end a prompt, decode rows, and prompt tokens that want log-probabilities."""


def results_region(width: int, prompt_rows: int) -> Region:
    """Tokens, statuses and log-probabilities by group; see GROUPS."""
    layout = Layout()
    for group in GROUPS:
        rows = prompt_rows if group == "prompt" else width
        if group != "prompt":
            for name in ("tokens", "statuses"):
                layout.add("results", f"{group}.{name}", (rows,), DType.I32)
        layout.add("results", f"{group}.logprobs", (rows,), DType.F32)
        layout.add("results", f"{group}.ranks", (rows,), DType.I32)
        layout.add("results", f"{group}.top_ids", (rows, MAX_ALTERNATIVES), DType.I32)
        layout.add("results", f"{group}.top_logprobs", (rows, MAX_ALTERNATIVES), DType.F32)
    return Region("results", layout)


class Tail:
    """Makes the calls that follow a body."""

    def __init__(self, parts: Parts, results: Arena) -> None:
        """results: the results region on the device."""
        self._parts = parts
        self._results = results

    def decode(self, products: Products, key: SampleKey) -> list[Call]:
        """All rows of a whole pass sample. products: the pass's; its calls become part of the result."""
        slots = self._parts.staging.tensor("decode_slots").rows(0, key.width)
        self._logits(products)
        return [*products.calls, *self._sample(key, slots, "decode", first_token=False)]

    def first_tokens(self, key: SampleKey) -> list[Call]:
        """Those rows of a prefill pass sample that end a prompt."""
        rows = self._parts.staging.tensor("last_rows").rows(0, key.width)
        slots = self._parts.staging.tensor("first_slots").rows(0, key.width)
        products = rest_of_last_layer(self._parts, rows)
        self._logits(products)
        return [*products.calls, *self._sample(key, slots, "first", first_token=True)]

    def prompt_logprobs(self, group: int) -> list[Call]:
        """Of entries group · logit_rows … of the prompt lists."""
        count = self._parts.buffers.plan.sizes.logit_rows
        start, stop = group * count, (group + 1) * count
        rows, targets, alternatives = (
            self._parts.staging.tensor(f"prompt_{name}").rows(start, stop)
            for name in ("rows", "targets", "alternatives")
        )
        products = rest_of_last_layer(self._parts, rows)
        self._logits(products)
        buffers = self._parts.buffers
        report = token_logprobs(
            self._parts.library,
            logits=buffers.logits.logits.rows(0, count),
            targets=targets,
            alternatives=alternatives,
            slots=buffers.slots,
            parts=buffers.logits.logprob_parts,
            outputs=self._outputs("prompt", start, stop),
        )
        return [*products.calls, *report]

    def _logits(self, products: Products) -> None:
        logits = self._parts.buffers.logits.logits.rows(0, products.rows)
        products.head(final_norm(self._parts), self._parts.weights.head, logits)

    def _sample(self, key: SampleKey, row_slot: Tensor, group: str, *, first_token: bool) -> list[Call]:
        buffers, library = self._parts.buffers, self._parts.library
        logits = part(buffers.logits.logits, key.width, self._parts.config.vocab_size)
        tokens = self._results.tensor(f"{group}.tokens").rows(0, key.width)
        calls: list[Call] = [
            *sample(
                library,
                logits=logits,
                row_slot=row_slot,
                slots=buffers.slots,
                scratch=buffers.sample,
                tokens=tokens,
                statuses=self._results.tensor(f"{group}.statuses").rows(0, key.width),
                first_token=first_token,
                all_greedy=key.greedy,
            )
        ]
        if key.logprobs:
            calls += token_logprobs(
                library,
                logits=logits,
                targets=tokens,
                row_slot=row_slot,
                slots=buffers.slots,
                parts=buffers.logits.logprob_parts,
                outputs=self._outputs(group, 0, key.width),
            )
        return calls

    def _outputs(self, group: str, start: int, stop: int) -> LogprobOutputs:
        return LogprobOutputs(
            *(
                self._results.tensor(f"{group}.{name}").rows(start, stop)
                for name in ("logprobs", "ranks", "top_ids", "top_logprobs")
            )
        )
