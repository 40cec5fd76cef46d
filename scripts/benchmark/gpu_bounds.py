"""What a card's measured bandwidth and product rate allow for a dense model of a given shape, in bf16.

A decode step reads every weight once and every cached key and value once; a prompt pass multiplies by every
weight. Nothing is subtracted for launches, activations or norms: no engine reaches these limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BYTES = 2
"""Of a bf16 weight, key or value."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the limits depend on."""

    layers: int
    layer_weights: int
    """Matrix elements of one layer."""
    head_weights: int
    kv_elements: int
    """Keys and values of one token in one layer."""
    attention_width: int
    """Query heads × head_dim."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """From a Hugging Face config."""
        hidden, intermediate = config["hidden_size"], config["intermediate_size"]
        queries = config["num_attention_heads"] * config["head_dim"]
        keys = config["num_key_value_heads"] * config["head_dim"]
        layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * intermediate
        return cls(config["num_hidden_layers"], layer, hidden * config["vocab_size"], 2 * keys, queries)

    def decode_limit(self, rows: int, context: float, bandwidth: float) -> float:
        """Tokens/s of `rows` sequences of so many tokens, at `bandwidth` bytes/s."""
        weights = self.layers * self.layer_weights + self.head_weights
        cached = rows * context * self.layers * self.kv_elements
        return rows * bandwidth / (_BYTES * (weights + cached))

    def prefill_flops(self, tokens: int) -> float:
        """Of one prompt, causal attention counted by half, the head for its last token alone."""
        products = 2.0 * tokens * self.layers * self.layer_weights + 2.0 * self.head_weights
        attention = self.layers * 2.0 * tokens * tokens * self.attention_width
        return products + attention

    def prefill_limit(self, tokens: int, flops: float) -> float:
        """Prompt tokens/s at `flops` operations/s."""
        return tokens * flops / self.prefill_flops(tokens)
