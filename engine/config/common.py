"""What the families' mappings share: attention, feed-forward and whole models in the usual spelling."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config.model import (
    Activation,
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelConfig,
    NormSpec,
)
from engine.config.reader import REQUIRED, Section
from engine.config.rope import RopeKind, RopeSpec
from engine.errors import UnsupportedModelError

MAX_LAYERS = 1024
MAX_EXPERTS = 4096

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}

_MUST_BE_NEUTRAL: dict[str, tuple[object, ...]] = {
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "attn_temperature_tuning": (False,),
    "clip_qkv": (),
    "embedding_multiplier": (1.0,),
    "is_causal": (True,),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "final_logit_softcapping": (),
    "num_local_experts": (0, 1),
    "parallel_attn": (False,),
    "per_layer_config": ({},),
    "qk_layernorm": (False,),
    "residual_multiplier": (1.0,),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
}
"""Keys of other families that change the mathematics, and their values that do not (besides null)."""


def refuse_unknown_mathematics(config: Section, *, handled: Sequence[str] = ()) -> None:
    """Raises UnsupportedModelError for a key that this family's mapping would wrongly ignore."""
    for key, neutral in _MUST_BE_NEUTRAL.items():
        if key in config and key not in handled and config.values[key] not in neutral:
            raise UnsupportedModelError(
                f"{config.where}: {key} = {config.values[key]!r} is not supported for this architecture"
            )


def read_activation(config: Section, key: str = "hidden_act", default: str = "silu") -> Activation:
    name = config.string(key, default)
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{config.where}: {key} {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def read_n_layers(config: Section) -> int:
    return config.integer("num_hidden_layers", REQUIRED, maximum=MAX_LAYERS)


def read_norm(config: Section, *, default_eps: float = 1e-6, weight_offset: float = 0.0) -> NormSpec:
    return NormSpec(config.number("rms_norm_eps", default_eps, minimum=0.0, maximum=1.0), weight_offset)


def read_heads(config: Section) -> tuple[int, int, int]:
    """(heads, kv heads, head_dim)."""
    hidden = config.integer("hidden_size", REQUIRED)
    n_heads = config.integer("num_attention_heads", REQUIRED)
    n_kv_heads = config.integer("num_key_value_heads", n_heads)
    head_dim = config.integer("head_dim", None)
    if head_dim is None:
        if hidden % n_heads:
            raise config.error("num_attention_heads", f"({n_heads}) must divide hidden_size ({hidden})")
        head_dim = hidden // n_heads
    check_heads(config, n_heads, n_kv_heads, head_dim)
    return n_heads, n_kv_heads, head_dim


def check_heads(config: Section, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
    """Raises ConfigError for head counts and sizes that cannot work."""
    if n_heads % n_kv_heads:
        raise config.error("num_key_value_heads", f"({n_kv_heads}) must divide the {n_heads} heads")
    if head_dim % 2:
        raise config.error("head_dim", f"must be even, not {head_dim}")


def read_attention(
    config: Section,
    *,
    rope: RopeSpec | None,
    window: int | None = None,
    qk_norm: NormSpec | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    output_gate: bool = False,
) -> AttentionSpec:
    """Attention with the usual head keys and a scale of 1/√head_dim."""
    n_heads, n_kv_heads, head_dim = read_heads(config)
    return AttentionSpec(
        n_heads,
        n_kv_heads,
        head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        window=window,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        output_gate=output_gate,
    )


def read_layer_types(
    config: Section, n_layers: int, default: Sequence[str], known: Sequence[str]
) -> list[str]:
    """`layer_types`, one per layer, each among `known`."""
    types = config.strings("layer_types", tuple(default))
    if len(types) < n_layers:
        raise config.error("layer_types", f"has {len(types)} entries for {n_layers} layers")
    for name in types[:n_layers]:
        if name not in known:
            raise UnsupportedModelError(
                f"{config.where}: layer type {name!r} is not supported here; supported are {', '.join(known)}"
            )
    return list(types[:n_layers])


def read_dense(
    config: Section,
    *,
    bias: bool = False,
    activation_key: str = "hidden_act",
    default_activation: str = "silu",
) -> DenseSpec:
    intermediate = config.integer("intermediate_size", REQUIRED)
    return DenseSpec(intermediate, read_activation(config, activation_key, default_activation), bias)


def read_n_experts(config: Section, *, minimum: int) -> int:
    """`num_experts`, which newer files call `num_local_experts`."""
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    if key not in config:
        raise config.error("num_experts", "is missing")
    return config.integer(key, REQUIRED, minimum=minimum, maximum=MAX_EXPERTS)


def read_experts(config: Section) -> tuple[int, int, int]:
    """(experts, experts per token, intermediate size of one)."""
    n_experts = read_n_experts(config, minimum=1)
    top_k = config.integer("num_experts_per_tok", REQUIRED, maximum=n_experts)
    return n_experts, top_k, config.integer("moe_intermediate_size", REQUIRED)


def assemble(
    config: Section,
    family: str,
    architecture: str,
    layers: Sequence[LayerSpec],
    *,
    norm: NormSpec,
    tied_by_default: bool = False,
    embedding_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> ModelConfig:
    """The model around its layers."""
    return ModelConfig(
        family=family,
        architecture=architecture,
        vocab_size=config.integer("vocab_size", REQUIRED),
        hidden_size=config.integer("hidden_size", REQUIRED),
        layers=tuple(layers),
        final_norm=norm,
        tied_embeddings=config.boolean("tie_word_embeddings", tied_by_default),
        max_sequence_length=_max_length(config, layers),
        embedding_scale=embedding_scale,
        logit_softcap=logit_softcap,
    )


def _max_length(config: Section, layers: Sequence[LayerSpec]) -> int:
    """Positions the model was made for. Yarn files may state the length before stretching."""
    length = config.integer("max_position_embeddings", 2048)
    for layer in layers:
        rope = getattr(layer.mixer, "rope", None)
        if isinstance(rope, RopeSpec) and rope.kind is RopeKind.YARN:
            return max(length, int(rope.original_max_position * rope.factor))
    return length
