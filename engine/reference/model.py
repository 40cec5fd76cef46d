"""The forward pass: embedding, the list of layers, final norm, head. Knows no slot's sampling, no plan.

It walks the LayerSpecs of the ModelConfig; which family they came from it does not know.
"""

from __future__ import annotations

import numpy as np

from engine.checkpoint import Checkpoint
from engine.config import AttentionSpec, DenseSpec, LayerSpec, ModelConfig
from engine.interface import Progress
from engine.options import Precision
from engine.reference.arrays import FloatArray, IntArray
from engine.reference.batch import RaggedBatch
from engine.reference.holding import AS_STORED, Holding
from engine.reference.layers.attention import AttentionMixer, Ropes
from engine.reference.layers.delta_net import DeltaNetMixer
from engine.reference.layers.feed_forward import DenseFeedForward
from engine.reference.layers.layer import FeedForwardLayer, Layer, MixerLayer
from engine.reference.layers.moe import MoEFeedForward
from engine.reference.ops.activation import softcap
from engine.reference.ops.embedding import embed
from engine.reference.ops.norm import rms_norm
from engine.reference.ops.rope import rope_cos_sin
from engine.reference.row_widths import (
    COLUMN_CANDIDATES,
    ROW_CANDIDATES,
    Widths,
    page_product,
    prove,
    weight_product,
)
from engine.reference.weights import Linear, WeightReader


class ReferenceModel:
    """A loaded model with its KV pages and recurrent state."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        pages: int,
        slots: int,
        progress: Progress | None = None,
        holding: Holding = AS_STORED,
    ) -> None:
        """Reads every weight once. `progress` hears of it from 0 to 1."""
        self.config = checkpoint.config
        self.columns = _prove_columns(self.config)
        self._n_slots = slots
        self._holding = holding
        reader = _counting_reader(checkpoint, progress, holding)
        self._embedding, self._head = _read_vocabulary(self.config, reader, holding)
        self._layers = [
            self._make_layer(spec, reader.under(f"layers.{index}"), pages)
            for index, spec in enumerate(self.config.layers)
        ]
        self._final_norm = reader.norm("final_norm", self.config.final_norm)
        self._ropes = {
            mixer.rope: mixer.rope.inverse_frequencies()
            for mixer in (layer.mixer for layer in self.config.layers)
            if isinstance(mixer, AttentionSpec) and mixer.rope is not None
        }
        self.rows = self._prove_rows()

    def forward(self, batch: RaggedBatch) -> FloatArray:
        """Final hidden states after the last norm, float32 [padded rows, hidden]."""
        hidden = embed(batch.tokens, self._embedding, self.config.embedding_scale)
        ropes = self._cos_sin(batch)
        for layer in self._layers:
            layer(hidden, batch, ropes)
        return rms_norm(hidden, self._final_norm, self.config.final_norm.eps)

    def logits(self, hidden: FloatArray) -> FloatArray:
        """Raw logits float32 [n, vocab] of n ≥ 1 final hidden states [n, hidden]."""
        rows = len(hidden)
        padded = np.zeros((self.rows.pad(rows), hidden.shape[1]), np.float32)
        padded[:rows] = hidden
        logits = self._head(padded)[:rows]
        cap = self.config.logit_softcap
        return logits if cap is None else softcap(logits, cap)

    def forget(self, slot: int) -> None:
        """Resets recurrent state for a new sequence in the slot."""
        for layer in self._layers:
            layer.mixer.forget(slot)

    def scrub(self, slot: int, pages: IntArray) -> None:
        """Clears what a failed sequence may have left that is not finite."""
        for layer in self._layers:
            layer.mixer.scrub(slot, pages)

    def fallbacks(self) -> list[str]:
        """What the host's BLAS does not give, for people."""
        widths = {"weights": self.rows, **{f"head_dim {d}": w for d, w in self.columns.items()}}
        return [
            f"BLAS rounds a row differently at different places of a product ({what}): "
            "a sequence's last bits may depend on its batch"
            for what, width in widths.items()
            if not width.position_free
        ]

    def _make_layer(self, spec: LayerSpec, reader: WeightReader, pages: int) -> Layer:
        return Layer(
            spec, reader, self._make_mixer(spec, reader, pages), self._make_feed_forward(spec, reader)
        )

    def _make_mixer(self, spec: LayerSpec, reader: WeightReader, pages: int) -> MixerLayer:
        mixer = spec.mixer
        if isinstance(mixer, AttentionSpec):
            columns = self.columns[mixer.head_dim].pad
            kv_dtype = self._holding.kv_dtype
            return AttentionMixer(mixer, reader.under("attention"), pages, columns, kv_dtype)
        return DeltaNetMixer(mixer, reader.under("deltanet"), self._n_slots)

    def _make_feed_forward(self, spec: LayerSpec, reader: WeightReader) -> FeedForwardLayer:
        feed_forward = spec.feed_forward
        if isinstance(feed_forward, DenseSpec):
            return DenseFeedForward(feed_forward, reader.under("feed_forward"))
        return MoEFeedForward(feed_forward, reader.under("moe"))

    def _cos_sin(self, batch: RaggedBatch) -> Ropes:
        return {
            rope: rope_cos_sin(batch.positions, frequencies, rope.attention_factor)
            for rope, frequencies in self._ropes.items()
        }

    def _prove_rows(self) -> Widths:
        """Row widths on which the products with every shape of weight agree."""
        linears = [self._head]
        for layer in self._layers:
            linears += layer.mixer.linears() + layer.feed_forward.linears()
        by_shape = {linear.weight.shape: linear.weight for linear in linears}
        return prove(map(weight_product, by_shape.values()), ROW_CANDIDATES)


def _prove_columns(config: ModelConfig) -> dict[int, Widths]:
    """Widths of attention tiles by head_dim."""
    head_dims = {layer.mixer.head_dim for layer in config.layers if isinstance(layer.mixer, AttentionSpec)}
    return {head_dim: prove([page_product(head_dim)], COLUMN_CANDIDATES) for head_dim in head_dims}


def _read_vocabulary(
    config: ModelConfig, reader: WeightReader, holding: Holding
) -> tuple[FloatArray, Linear]:
    """The embedding table [vocab, hidden] and the head, which is the same array if they are tied and held
    alike."""
    table = reader.array("embedding.weight")
    is_shared = config.tied_embeddings and holding.precision is not Precision.Q4
    return table, Linear(table) if is_shared else reader.linear("head")


def _counting_reader(checkpoint: Checkpoint, progress: Progress | None, holding: Holding) -> WeightReader:
    if progress is None:
        return WeightReader(checkpoint, holding=holding)
    total = sum(checkpoint.tensor(name).n_bytes for name in checkpoint.names())
    read = 0

    def count(n_bytes: int) -> None:
        nonlocal read
        read += n_bytes
        progress("weights", min(1.0, read / total))

    return WeightReader(checkpoint, count=count, holding=holding)
