"""Qwen2 and 2.5 (and 2.5-VL's text model), Qwen3, Qwen3-MoE."""

from __future__ import annotations

from engine.config.common import (
    assemble,
    read_activation,
    read_attention,
    read_dense,
    read_experts,
    read_heads,
    read_layer_types,
    read_n_experts,
    read_n_layers,
    read_norm,
    refuse_unknown_mathematics,
)
from engine.config.families import Family
from engine.config.model import FeedForward, LayerSpec, ModelConfig, MoESpec
from engine.config.reader import Section
from engine.config.rope_reader import read_rope

_DEFAULT_WINDOW = 4096
_DEFAULT_THETA = {"qwen2_5_vl": 1e6, "qwen2_5_vl_text": 1e6}
"""By model_type, where config.json gives none; all others have 1e4."""


def read_qwen2(config: Section, architecture: str) -> ModelConfig:
    """Biases on q, k and v always; a window from some layer on, if any."""
    return _read_dense(config, "qwen2", architecture, qkv_bias=True, output_bias=False, has_qk_norm=False)


def read_qwen3(config: Section, architecture: str) -> ModelConfig:
    """Norms on q and k; biases all or none."""
    bias = config.boolean("attention_bias", False)
    return _read_dense(config, "qwen3", architecture, qkv_bias=bias, output_bias=bias, has_qk_norm=True)


def _read_dense(
    config: Section, family: str, architecture: str, *, qkv_bias: bool, output_bias: bool, has_qk_norm: bool
) -> ModelConfig:
    refuse_unknown_mathematics(config)
    n_layers = read_n_layers(config)
    norm = read_norm(config)
    window = _window(config)
    first_sliding = config.integer("max_window_layers", 28, minimum=0)
    default_types = [
        "sliding_attention" if window is not None and index >= first_sliding else "full_attention"
        for index in range(n_layers)
    ]
    types = read_layer_types(config, n_layers, default_types, ["full_attention", "sliding_attention"])
    default_theta = _DEFAULT_THETA.get(config.string("model_type", ""), 1e4)
    rope = read_rope(config, read_heads(config)[2], default_theta=default_theta)
    dense = read_dense(config)
    layers = [
        LayerSpec(
            read_attention(
                config,
                rope=rope,
                window=window if kind == "sliding_attention" else None,
                qk_norm=norm if has_qk_norm else None,
                qkv_bias=qkv_bias,
                output_bias=output_bias,
            ),
            dense,
            norm,
        )
        for kind in types
    ]
    return assemble(config, family, architecture, layers, norm=norm)


def _window(config: Section) -> int | None:
    """`sliding_window` counts only where `use_sliding_window` says so."""
    if not config.boolean("use_sliding_window", False):
        return None
    return config.integer("sliding_window", None if config.mentions("sliding_window") else _DEFAULT_WINDOW)


def read_qwen3_moe(config: Section, architecture: str) -> ModelConfig:
    """Qwen3's attention; experts in every decoder_sparse_step-th layer but those of mlp_only_layers."""
    refuse_unknown_mathematics(config, handled=("num_local_experts",))
    n_layers = read_n_layers(config)
    norm = read_norm(config)
    bias = config.boolean("attention_bias", False)
    attention = read_attention(
        config,
        rope=read_rope(config, read_heads(config)[2]),
        window=_window(config),
        qk_norm=norm,
        qkv_bias=bias,
        output_bias=bias,
    )
    n_experts = read_n_experts(config, minimum=0)
    step = config.integer("decoder_sparse_step", 1)
    dense_only = config.integers("mlp_only_layers", ())
    layers = []
    for index in range(n_layers):
        is_sparse = index not in dense_only and n_experts > 0 and (index + 1) % step == 0
        feed_forward: FeedForward = _experts(config) if is_sparse else read_dense(config)
        layers.append(LayerSpec(attention, feed_forward, norm))
    return assemble(config, "qwen3_moe", architecture, layers, norm=norm)


def _experts(config: Section) -> MoESpec:
    n_experts, top_k, intermediate = read_experts(config)
    return MoESpec(
        n_experts,
        top_k,
        intermediate,
        normalise_top_k=config.boolean("norm_topk_prob", True),
        activation=read_activation(config),
    )


FAMILIES = (
    Family(
        "qwen2",
        ("qwen2", "qwen2_5_vl", "qwen2_5_vl_text"),
        ("Qwen2ForCausalLM", "Qwen2_5_VLForConditionalGeneration"),
        read_qwen2,
    ),
    Family("qwen3", ("qwen3",), ("Qwen3ForCausalLM",), read_qwen3),
    Family("qwen3_moe", ("qwen3_moe",), ("Qwen3MoeForCausalLM",), read_qwen3_moe),
)
