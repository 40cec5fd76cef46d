"""Qwen3.5 and 3.6, dense and MoE (also published under the name Ornith): DeltaNet and attention in turn."""

from __future__ import annotations

from engine.config.common import (
    assemble,
    read_activation,
    read_attention,
    read_dense,
    read_experts,
    read_heads,
    read_layer_types,
    read_n_layers,
    read_norm,
    refuse_unknown_mathematics,
)
from engine.config.families import Family
from engine.config.model import AttentionSpec, DeltaNetSpec, FeedForward, LayerSpec, ModelConfig, MoESpec
from engine.config.reader import REQUIRED, Section
from engine.config.rope_reader import read_rope
from engine.errors import UnsupportedModelError


def read_dense_hybrid(config: Section, architecture: str) -> ModelConfig:
    return _read(config, "qwen3_5", architecture, read_dense(config))


def read_moe_hybrid(config: Section, architecture: str) -> ModelConfig:
    n_experts, top_k, intermediate = read_experts(config)
    experts = MoESpec(
        n_experts,
        top_k,
        intermediate,
        normalise_top_k=True,
        shared_intermediate=config.integer("shared_expert_intermediate_size", REQUIRED),
        activation=read_activation(config),
    )
    return _read(config, "qwen3_5_moe", architecture, experts)


def _read(config: Section, family: str, architecture: str, feed_forward: FeedForward) -> ModelConfig:
    refuse_unknown_mathematics(config, handled=("num_local_experts",))
    if not config.boolean("attn_output_gate", True):
        raise UnsupportedModelError(f"{config.where}: attn_output_gate = false is not supported")
    n_layers = read_n_layers(config)
    interval = config.integer("full_attention_interval", 4)
    default_types = [
        "full_attention" if (index + 1) % interval == 0 else "linear_attention" for index in range(n_layers)
    ]
    types = read_layer_types(config, n_layers, default_types, ["full_attention", "linear_attention"])
    norm = read_norm(config, weight_offset=1.0)
    attention, deltanet = _attention(config), _deltanet(config)
    layers = [
        LayerSpec(attention if kind == "full_attention" else deltanet, feed_forward, norm) for kind in types
    ]
    return assemble(config, family, architecture, layers, norm=norm)


def _attention(config: Section) -> AttentionSpec:
    bias = config.boolean("attention_bias", False)
    return read_attention(
        config,
        rope=read_rope(config, read_heads(config)[2], default_partial=0.25),
        qk_norm=read_norm(config, weight_offset=1.0),
        qkv_bias=bias,
        output_bias=bias,
        output_gate=True,
    )


def _deltanet(config: Section) -> DeltaNetSpec:
    n_key_heads = config.integer("linear_num_key_heads", REQUIRED)
    n_value_heads = config.integer("linear_num_value_heads", REQUIRED)
    if n_value_heads % n_key_heads:
        raise config.error(
            "linear_num_key_heads", f"({n_key_heads}) must divide the {n_value_heads} value heads"
        )
    return DeltaNetSpec(
        n_key_heads,
        n_value_heads,
        key_head_dim=config.integer("linear_key_head_dim", REQUIRED),
        value_head_dim=config.integer("linear_value_head_dim", REQUIRED),
        conv_kernel=config.integer("linear_conv_kernel_dim", 4, maximum=64),
        norm_eps=read_norm(config).eps,
        activation=read_activation(config),
    )


FAMILIES = (
    Family(
        "qwen3_5",
        ("qwen3_5", "qwen3_5_text"),
        ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
        read_dense_hybrid,
    ),
    Family(
        "qwen3_5_moe",
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        read_moe_hybrid,
    ),
)
