"""From the residual stream to sampled tokens and log-probabilities: the calls behind a program's last layer.

Knows rows and slots, no layer. Results land in the results region, one group per kind of row.
"""

from __future__ import annotations

from engine.cuda.buffers import part
from engine.cuda.memory import Arena, Layout
from engine.cuda.program import Call, Parts, head_key
from engine.cuda.regions import Region
from engine.cuda.work import SampleKey
from kernels.logprobs import MAX_ALTERNATIVES, LogprobOutputs, token_logprobs
from kernels.norm import add_rms_norm
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

    def __init__(self, parts: Parts, results: Arena, *, adds_delta: bool) -> None:
        """results: the results region on the device. adds_delta: see Body.leaves_delta."""
        self._parts = parts
        self._results = results
        self._adds_delta = adds_delta

    def decode(self, key: SampleKey) -> list[Call]:
        """All rows of a decode body sample."""
        slots = self._parts.staging.tensor("decode_slots").rows(0, key.width)
        return [*self._logits(key.width), *self._sample(key, slots, "decode", first_token=False)]

    def first_tokens(self, key: SampleKey) -> list[Call]:
        """Those rows of a prefill body sample that end a prompt."""
        rows = self._parts.staging.tensor("last_rows").rows(0, key.width)
        slots = self._parts.staging.tensor("first_slots").rows(0, key.width)
        return [*self._logits(key.width, rows), *self._sample(key, slots, "first", first_token=True)]

    def prompt_logprobs(self, group: int) -> list[Call]:
        """Of entries group · logit_rows … of the prompt lists."""
        count = self._parts.buffers.plan.sizes.logit_rows
        start, stop = group * count, (group + 1) * count
        rows, targets, alternatives = (
            self._parts.staging.tensor(f"prompt_{name}").rows(start, stop)
            for name in ("rows", "targets", "alternatives")
        )
        outputs = self._outputs("prompt", start, stop)
        buffers = self._parts.buffers
        report = token_logprobs(
            self._parts.library,
            logits=buffers.logits.logits.rows(0, count),
            targets=targets,
            alternatives=alternatives,
            slots=buffers.slots,
            parts=buffers.logits.logprob_parts,
            outputs=outputs,
        )
        return [*self._logits(count, rows), *report]

    def _logits(self, count: int, row_index: Tensor | None = None) -> list[Call]:
        """Final norm and head, of the first rows or of chosen ones."""
        parts, activations = self._parts, self._parts.buffers.activations
        residual, delta = activations.residual, activations.delta
        if row_index is None:
            residual, delta = residual.rows(0, count), delta.rows(0, count)
        normed = parts.buffers.logits.normed.rows(0, count)
        norm = add_rms_norm(
            parts.library,
            residual=residual,
            weight=parts.weights.final_norm,
            out=normed,
            epsilon=parts.config.final_norm.eps,
            delta=delta if self._adds_delta else None,
            row_index=row_index,
            weight_offset=parts.config.final_norm.weight_offset,
        )
        head = parts.planner.plan(head_key(count, parts.config)).bind(
            x=normed, w=parts.weights.head, y=self._parts.buffers.logits.logits.rows(0, count),
            workspace=activations.workspace,
        )  # fmt: skip
        return [norm, head]

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
