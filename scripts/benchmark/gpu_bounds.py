"""What a card's measured bandwidth and product rates allow for a dense model of a given shape and precision.

A decode step reads every weight once and every cached key and value once; a prompt pass multiplies by every
weight. Nothing is subtracted for launches, activations or norms: no engine reaches these limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BF16_BYTES = 2.0
_WEIGHT_BYTES = {"bf16": _BF16_BYTES, "q4": 18 / 32, "fp8": 1.0}
"""Of a layer's weight; q4_0 has a 2-byte scale for 32 of them. FP8's scales, one a row, count for nothing."""
_KV_BYTES = {"bf16": _BF16_BYTES, "fp8": 1.0}


@dataclass(frozen=True, slots=True)
class Tier:
    """How weights, keys and values are held: names of EngineOptions.precision and kv_dtype."""

    precision: str = "bf16"
    kv_dtype: str = "bf16"

    def __post_init__(self) -> None:
        """Raises ValueError for names that nothing is known of."""
        if self.precision not in _WEIGHT_BYTES or self.kv_dtype not in _KV_BYTES:
            raise ValueError(f"nothing is known of {self.precision} weights with {self.kv_dtype} KV")

    @property
    def name(self) -> str:
        """As figures have it: "fp8", or "fp8, KV fp8"."""
        return self.precision + ("" if self.kv_dtype == "bf16" else f", KV {self.kv_dtype}")

    @property
    def weight_bytes(self) -> float:
        return _WEIGHT_BYTES[self.precision]

    @property
    def head_bytes(self) -> float:
        """Of FP8 the head stays in bf16."""
        return _BF16_BYTES if self.precision == "fp8" else self.weight_bytes

    @property
    def kv_bytes(self) -> float:
        return _KV_BYTES[self.kv_dtype]


BF16 = Tier()


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured beside the figures."""

    bandwidth: float
    """Bytes read or written per second."""
    bf16: float
    """Operations per second of a large product."""
    fp8: float


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

    def decode_limit(self, rows: int, context: float, bandwidth: float, tier: Tier = BF16) -> float:
        """Tokens/s of `rows` sequences of so many tokens, at `bandwidth` bytes/s."""
        weights = self.layers * self.layer_weights * tier.weight_bytes + self.head_weights * tier.head_bytes
        cached = rows * context * self.layers * self.kv_elements * tier.kv_bytes
        return rows * bandwidth / (weights + cached)

    def prefill_seconds(self, tokens: int, rates: Rates, tier: Tier = BF16) -> float:
        """Of one prompt, causal attention counted by half, the head for its last token alone. Only FP8's
        products run at the rate of FP8; q4 is multiplied in bf16, and so are attention and the head."""
        products = 2.0 * tokens * self.layers * self.layer_weights
        others = self.layers * 2.0 * tokens * tokens * self.attention_width + 2.0 * self.head_weights
        rate = rates.fp8 if tier.precision == "fp8" else rates.bf16
        return products / rate + others / rates.bf16

    def prefill_limit(self, tokens: int, rates: Rates, tier: Tier = BF16) -> float:
        """Prompt tokens/s."""
        return tokens / self.prefill_seconds(tokens, rates, tier)
