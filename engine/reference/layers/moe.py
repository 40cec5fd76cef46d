"""A mixture of experts as a feed-forward: router, experts, shared expert. Knows no slot and no position."""

from __future__ import annotations

import numpy as np

from engine.config import DenseSpec, MoESpec
from engine.reference.arrays import FloatArray
from engine.reference.batch import RaggedBatch
from engine.reference.layers.feed_forward import DenseFeedForward
from engine.reference.ops.activation import sigmoid
from engine.reference.ops.moe import round_bfloat16, route_top_k, rows_by_expert
from engine.reference.weights import Linear, WeightReader


class MoEFeedForward:
    """The weighted sum of each row's top_k experts, plus a shared expert under a sigmoid gate."""

    def __init__(self, spec: MoESpec, reader: WeightReader) -> None:
        self._spec = spec
        self._router = reader.linear("router")
        self._rounds = reader.is_bfloat16("router.weight")
        expert = DenseSpec(spec.intermediate, spec.activation)
        self._experts = [
            DenseFeedForward(expert, reader.under(f"experts.{index}")) for index in range(spec.n_experts)
        ]
        self._shared: DenseFeedForward | None = None
        if spec.shared_intermediate is not None:
            shared = DenseSpec(spec.shared_intermediate, spec.activation)
            self._shared = DenseFeedForward(shared, reader.under("shared"))
            self._shared_gate = reader.array("shared_gate.weight")

    def linears(self) -> list[Linear]:
        shared = [] if self._shared is None else self._shared.linears()
        return [self._router, *self._experts[0].linears(), *shared]

    def __call__(self, hidden: FloatArray, batch: RaggedBatch) -> FloatArray:
        """float32 [padded rows, hidden] to the same.

        A row's experts are added in the order of their numbers, so its sum does not depend on the batch.
        """
        spec = self._spec
        experts, weights = route_top_k(
            self._router_logits(hidden)[: batch.rows], spec.top_k, normalise=spec.normalise_top_k
        )
        out = np.zeros_like(hidden)
        for expert, rows, places in rows_by_expert(experts):
            gathered = np.zeros((batch.widths.pad(len(rows)), hidden.shape[1]), np.float32)
            gathered[: len(rows)] = hidden[rows]
            update = self._experts[expert](gathered, batch)[: len(rows)]
            update *= weights[rows, places, None]
            out[rows] += update
        if self._shared is not None:
            out += self._shared(hidden, batch) * self._gate(hidden)
        return out

    def _router_logits(self, hidden: FloatArray) -> FloatArray:
        """float32 [rows, experts]. With a bf16 router the model was trained on, and chooses by, logits
        of a bf16 product: better precision would choose other experts where two are close.
        """
        if not self._rounds:
            return self._router(hidden)
        return round_bfloat16(self._router(round_bfloat16(hidden)))

    def _gate(self, hidden: FloatArray) -> FloatArray:
        """sigmoid(x · gate) [rows, 1]; a sum, since BLAS has another routine for a single output."""
        return sigmoid(np.add.reduce(hidden * self._shared_gate, axis=-1, keepdims=True))
