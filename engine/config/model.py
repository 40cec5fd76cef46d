"""A model as data: the list of layers that a forward pass walks. Knows no file format and no family.

Every difference between model families is a field here, so that an engine never asks which family it
runs. Fields are resolved: nothing is left to a default that the engine would have to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from engine.config.rope import RopeSpec
from engine.config.weights import WeightFormat


class Activation(StrEnum):
    """The gate's non-linearity in a gated feed-forward: act(gate) · up."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))."""


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMSNorm: x / sqrt(mean(x²) + eps) · (weight_offset + weight), computed in float32."""

    eps: float
    weight_offset: float = 0.0
    """1.0 for families that store the weight as a difference from one."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Causal softmax attention over pages, full or sliding.

    Order of work: project; norm q and k (and v) per head; rotate q and k; attend; multiply by
    sigmoid(gate) if gated; project out.
    """

    n_heads: int
    n_kv_heads: int
    """Divides n_heads; query head h reads kv head h // (n_heads // n_kv_heads)."""
    head_dim: int
    scale: float
    """Scores are scale · (q · k)."""
    rope: RopeSpec | None
    """None: no position information in this layer."""
    window: int | None = None
    """Position i attends to i − window + 1 … i (window keys, itself among them); None: to all before it."""
    qk_norm: NormSpec | None = None
    """Per-head RMSNorm with weight [head_dim] on q and on k, before the rotation."""
    v_norm_eps: float | None = None
    """Per-head RMSNorm without weight on v."""
    v_from_k: bool = False
    """There is no v projection: v is the k projection's output, before k's norm and rotation."""
    output_gate: bool = False
    """The q projection has 2 · head_dim rows a head: first the query's, then the gate's."""
    qkv_bias: bool = False
    output_bias: bool = False

    @property
    def q_dim(self) -> int:
        """Width of the attention result, which the output projection reads."""
        return self.n_heads * self.head_dim

    @property
    def q_rows(self) -> int:
        """Rows of the q projection: q_dim, twice that with an output gate."""
        return self.q_dim * (2 if self.output_gate else 1)

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def kind(self) -> str:
        """A short name for tables."""
        return "attention" if self.window is None else "sliding"


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """Gated DeltaNet: a recurrent mixer with a float32 state [n_value_heads, key_head_dim, value_head_dim].

    Value head h uses key head h // (n_value_heads // n_key_heads).
    """

    n_key_heads: int
    n_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    """Taps of the causal depthwise convolution over fused q | k | v; its state is conv_kernel − 1 rows."""
    norm_eps: float
    """Of the gated RMSNorm on the output, whose weight [value_head_dim] multiplies as it is."""
    activation: Activation = Activation.SILU
    """After the convolution."""

    @property
    def key_dim(self) -> int:
        return self.n_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        return self.n_value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of q | k | v: 2 · key_dim + value_dim."""
        return 2 * self.key_dim + self.value_dim

    @property
    def kind(self) -> str:
        return "deltanet"


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """down(act(gate(x)) · up(x))."""

    intermediate: int
    activation: Activation = Activation.SILU
    bias: bool = False

    @property
    def kind(self) -> str:
        return "dense"


@dataclass(frozen=True, slots=True)
class MoESpec:
    """A mixture of gated feed-forward experts: softmax over all experts, then the top_k largest."""

    n_experts: int
    top_k: int
    intermediate: int
    """Of one expert."""
    normalise_top_k: bool
    """Divide the chosen probabilities by their sum."""
    shared_intermediate: int | None = None
    """Intermediate size of a dense feed-forward beside the experts, added under sigmoid(shared_gate · x)."""
    activation: Activation = Activation.SILU

    @property
    def kind(self) -> str:
        return "moe" if self.shared_intermediate is None else "moe+shared"


Mixer = AttentionSpec | DeltaNetSpec
FeedForward = DenseSpec | MoESpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One block of the residual stream x:

    h = mixer(input_norm(x));            x ← x + (post_mixer_norm(h) if post_norms else h)
    h = feed_forward(feed_forward_norm(x)); x ← x + (post_feed_forward_norm(h) if post_norms else h)
    x ← x · scalar if has_scalar
    """

    mixer: Mixer
    feed_forward: FeedForward
    norm: NormSpec
    post_norms: bool = False
    has_scalar: bool = False
    """One learned number on the whole residual stream at the end of the layer."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything about a model but its weights and its text."""

    family: str
    """Which mapping read it, e.g. "qwen3"; for people and for finding tensor names, never for branching."""
    architecture: str
    """As the checkpoint calls itself, e.g. "Qwen3ForCausalLM" or "llama" in a GGUF file."""
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    tied_embeddings: bool
    """The head is the embedding matrix (unscaled)."""
    max_sequence_length: int
    """Positions the model was made for."""
    embedding_scale: float = 1.0
    """Multiplies embedded tokens, already rounded as the reference rounds it."""
    logit_softcap: float | None = None
    """Logits become softcap · tanh(logits / softcap)."""
    weight_format: WeightFormat = field(default_factory=WeightFormat)
    """How quantised weights are stored in the checkpoint."""

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> ModelConfig:
        """Reads a parsed config.json.

        Raises UnsupportedModelError for what is not implemented, by name; ConfigError for what is malformed.
        """
        from engine.config.hugging_face import model_config_from_hf

        return model_config_from_hf(config)

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that hold KV."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.mixer, AttentionSpec))

    @property
    def has_recurrent_state(self) -> bool:
        return any(isinstance(layer.mixer, DeltaNetSpec) for layer in self.layers)

    def kv_elements_per_token(self) -> int:
        """Numbers of K and V that one token adds over all layers (a window frees none of them here)."""
        mixers = (layer.mixer for layer in self.layers)
        return sum(2 * mixer.kv_dim for mixer in mixers if isinstance(mixer, AttentionSpec))

    def state_elements_per_sequence(self) -> int:
        """Numbers of recurrent and convolution state that one sequence holds, whatever its length."""
        mixers = (layer.mixer for layer in self.layers)
        return sum(
            m.n_value_heads * m.key_head_dim * m.value_head_dim + (m.conv_kernel - 1) * m.conv_dim
            for m in mixers
            if isinstance(m, DeltaNetSpec)
        )
