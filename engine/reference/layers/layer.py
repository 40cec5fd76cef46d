"""One block of the residual stream, made from its LayerSpec. Knows no slot."""

from __future__ import annotations

from typing import Protocol

from engine.config import LayerSpec
from engine.reference.arrays import FloatArray, IntArray
from engine.reference.batch import RaggedBatch
from engine.reference.layers.attention import Ropes
from engine.reference.ops.norm import rms_norm
from engine.reference.weights import Linear, WeightReader


class MixerLayer(Protocol):
    """What mixes rows of a sequence, and owns what it must remember of them."""

    def linears(self) -> list[Linear]:
        """Weights whose products need a proved number of rows."""
        ...

    def __call__(self, hidden: FloatArray, batch: RaggedBatch, ropes: Ropes) -> FloatArray:
        """float32 [padded rows, hidden] to the same; updates KV and state of the batch's sequences."""
        ...

    def forget(self, slot: int) -> None:
        """A new sequence takes the slot."""
        ...

    def scrub(self, slot: int, pages: IntArray) -> None:
        """A sequence has failed: leave nothing that is not finite in its pages and state."""
        ...


class FeedForwardLayer(Protocol):
    """What treats each row alone."""

    def linears(self) -> list[Linear]: ...

    def __call__(self, hidden: FloatArray, batch: RaggedBatch) -> FloatArray:
        """float32 [padded rows, hidden] to the same."""
        ...


class Layer:
    """Norms, mixer, feed-forward and residual additions, in the order LayerSpec describes."""

    def __init__(
        self, spec: LayerSpec, reader: WeightReader, mixer: MixerLayer, feed_forward: FeedForwardLayer
    ) -> None:
        self.mixer = mixer
        self.feed_forward = feed_forward
        self._eps = spec.norm.eps
        self._input_norm = reader.norm("input_norm", spec.norm)
        self._feed_forward_norm = reader.norm("feed_forward_norm", spec.norm)
        self._post_mixer_norm: FloatArray | None = None
        self._post_feed_forward_norm: FloatArray | None = None
        if spec.post_norms:
            self._post_mixer_norm = reader.norm("post_mixer_norm", spec.norm)
            self._post_feed_forward_norm = reader.norm("post_feed_forward_norm", spec.norm)
        self._scalar = reader.array("scalar") if spec.has_scalar else None

    def __call__(self, hidden: FloatArray, batch: RaggedBatch, ropes: Ropes) -> None:
        """Advances the residual stream, float32 [padded rows, hidden], in place."""
        mixed = self.mixer(rms_norm(hidden, self._input_norm, self._eps), batch, ropes)
        self._add(hidden, mixed, self._post_mixer_norm)
        fed = self.feed_forward(rms_norm(hidden, self._feed_forward_norm, self._eps), batch)
        self._add(hidden, fed, self._post_feed_forward_norm)
        if self._scalar is not None:
            hidden *= self._scalar

    def _add(self, hidden: FloatArray, update: FloatArray, post_norm: FloatArray | None) -> None:
        hidden += update if post_norm is None else rms_norm(update, post_norm, self._eps)
