"""Gemma 4, dense. Its other variants are refused, each by its feature's name."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from engine.config.common import (
    assemble,
    check_heads,
    read_dense,
    read_layer_types,
    read_n_layers,
    read_norm,
    refuse_unknown_mathematics,
)
from engine.config.families import Family
from engine.config.model import AttentionSpec, LayerSpec, ModelConfig, NormSpec
from engine.config.reader import REQUIRED, Section
from engine.config.rope import RopeKind, RopeSpec
from engine.config.rope_reader import read_rope
from engine.errors import UnsupportedModelError

_GLOBAL, _SLIDING = "full_attention", "sliding_attention"
_GLOBAL_HEAD_DIM = 512
_PER_LAYER_INPUT = 256


def read_gemma4(config: Section, architecture: str) -> ModelConfig:
    """Sliding layers with a global one after every five; four norms and a scalar a layer."""
    refuse_unknown_mathematics(config, handled=("final_logit_softcapping", "per_layer_config"))
    _refuse_variants(config)
    n_layers = read_n_layers(config)
    default_types = [_GLOBAL if (index + 1) % 6 == 0 else _SLIDING for index in range(n_layers)]
    types = read_layer_types(config, n_layers, default_types, [_GLOBAL, _SLIDING])
    types[-1] = _GLOBAL
    norm = read_norm(config)
    mixers = [
        _mixer(config, norm, kind, sizes) for kind, sizes in zip(types, _sizes(config, types), strict=True)
    ]
    dense = read_dense(config, activation_key="hidden_activation", default_activation="gelu_pytorch_tanh")
    layers = [LayerSpec(mixer, dense, norm, post_norms=True, has_scalar=True) for mixer in mixers]
    return assemble(
        config,
        "gemma4",
        architecture,
        layers,
        norm=norm,
        tied_by_default=True,
        embedding_scale=bf16_root(config.integer("hidden_size", REQUIRED)),
        logit_softcap=config.number("final_logit_softcapping", None, minimum=1e-3),
    )


def bf16_root(hidden: int) -> float:
    """√hidden as bf16 holds it: 73.5 for 5376."""
    return float(np.sqrt(np.float32(hidden)).astype(ml_dtypes.bfloat16))


def _refuse_variants(config: Section) -> None:
    """Raises UnsupportedModelError for what dense Gemma 4 does not have."""
    per_layer = config.integer("hidden_size_per_layer_input", None, minimum=0)
    if per_layer is None and not config.mentions("hidden_size_per_layer_input"):
        per_layer = _PER_LAYER_INPUT
    variants = {
        "per-layer embeddings (hidden_size_per_layer_input)": bool(per_layer),
        "layers that share keys and values (num_kv_shared_layers)": bool(
            config.integer("num_kv_shared_layers", 0, minimum=0)
        ),
        "a mixture of experts (enable_moe_block)": config.boolean("enable_moe_block", False),
        "bidirectional attention (use_bidirectional_attention)": config.string(
            "use_bidirectional_attention", ""
        )
        == "all",
    }
    for variant, is_used in variants.items():
        if is_used:
            raise UnsupportedModelError(
                f"{config.where}: Gemma 4 with {variant} is not supported; supported is dense Gemma 4"
            )


def _sizes(config: Section, types: list[str]) -> list[tuple[int, int]]:
    """(head_dim, kv heads) of each layer: those of global layers in keys of their own, or layer by layer."""
    base = config.integer("head_dim", 256), config.integer("num_key_value_heads", 4)
    by_layer = config.section("per_layer_config")
    if by_layer is None:
        n_kv_heads = base[1]
        if config.boolean("attention_k_eq_v", False):
            n_kv_heads = config.integer("num_global_key_value_heads", n_kv_heads)
        of_global = config.integer("global_head_dim", _GLOBAL_HEAD_DIM), n_kv_heads
        return [of_global if kind == _GLOBAL else base for kind in types]
    sizes = [_override(by_layer.section(str(index)), base) for index in range(len(types))]
    unknown = set(by_layer.values) - {str(index) for index in range(len(types))}
    if unknown:
        raise by_layer.error(min(unknown), "is no layer")
    return sizes


def _override(layer: Section | None, base: tuple[int, int]) -> tuple[int, int]:
    if layer is None:
        return base
    unknown = set(layer.values) - {"head_dim", "num_key_value_heads"}
    if unknown:
        raise UnsupportedModelError(f"{layer.where}: {min(unknown)} of a single layer is not supported")
    return layer.integer("head_dim", base[0]), layer.integer("num_key_value_heads", base[1])


def _mixer(config: Section, norm: NormSpec, layer_type: str, sizes: tuple[int, int]) -> AttentionSpec:
    """Scale 1; a norm on v; on global layers keys that serve as values where attention_k_eq_v says so."""
    head_dim, n_kv_heads = sizes
    n_heads = config.integer("num_attention_heads", REQUIRED)
    check_heads(config, n_heads, n_kv_heads, head_dim)
    is_global = layer_type == _GLOBAL
    bias = config.boolean("attention_bias", False)
    return AttentionSpec(
        n_heads,
        n_kv_heads,
        head_dim,
        scale=1.0,
        rope=_rope(config, layer_type, head_dim),
        window=None if is_global else config.integer("sliding_window", 512),
        qk_norm=norm,
        v_norm_eps=norm.eps,
        v_from_k=is_global and config.boolean("attention_k_eq_v", False),
        qkv_bias=bias,
        output_bias=bias,
    )


def _rope(config: Section, layer_type: str, head_dim: int) -> RopeSpec:
    """Settings by layer type; where there are none, global layers are proportional with a quarter turning."""
    has_settings = "rope_parameters" in config or "rope_scaling" in config
    is_default_global = layer_type == _GLOBAL and not has_settings
    return read_rope(
        config,
        head_dim,
        layer_type=layer_type,
        default_theta=1e6 if layer_type == _GLOBAL else 1e4,
        default_partial=0.25 if is_default_global else 1.0,
        default_kind=RopeKind.PROPORTIONAL if is_default_global else RopeKind.DEFAULT,
    )


FAMILIES = (
    Family(
        "gemma4",
        ("gemma4", "gemma4_text"),
        ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
        read_gemma4,
        tensor_names={
            "post_mixer_norm": "post_attention_layernorm",
            "feed_forward_norm": "pre_feedforward_layernorm",
            "post_feed_forward_norm": "post_feedforward_layernorm",
            "scalar": "layer_scalar",
        },
    ),
)
