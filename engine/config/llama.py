"""Llama and its likes: Llama 2 and 3.x, Mistral, Mistral 3 and Ministral 3 (text), SmolLM2 and SmolLM3."""

from __future__ import annotations

from dataclasses import replace

from engine.config.common import (
    assemble,
    read_attention,
    read_dense,
    read_heads,
    read_layer_types,
    read_n_layers,
    read_norm,
    refuse_unknown_mathematics,
)
from engine.config.families import Family
from engine.config.model import LayerSpec, ModelConfig
from engine.config.reader import Section
from engine.config.rope import RopeKind
from engine.config.rope_reader import read_rope

_DEFAULT_WINDOW = 4096


def read_llama(config: Section, architecture: str) -> ModelConfig:
    """Full attention everywhere; SmolLM2 calls itself Llama."""
    refuse_unknown_mathematics(config)
    norm = read_norm(config)
    bias = config.boolean("attention_bias", False)
    attention = read_attention(
        config, rope=read_rope(config, read_heads(config)[2]), qkv_bias=bias, output_bias=bias
    )
    layer = LayerSpec(attention, read_dense(config, bias=config.boolean("mlp_bias", False)), norm)
    return assemble(config, "llama", architecture, [layer] * read_n_layers(config), norm=norm)


def read_mistral(config: Section, architecture: str) -> ModelConfig:
    """As Llama without biases, with one window for all layers, or none (null; 4096 if nothing is said)."""
    default = None if config.mentions("sliding_window") else _DEFAULT_WINDOW
    return _read_mistral(config, "mistral", architecture, config.integer("sliding_window", default))


def read_ministral3(config: Section, architecture: str) -> ModelConfig:
    """As Mistral with yarn, up to the length before stretching.

    Beyond it queries are multiplied by 1 + β·ln(1 + ⌊position / original length⌋), which is not
    implemented; below it that factor is 1. So the longest sequence is the original length.
    """
    model = _read_mistral(config, "ministral3", architecture, config.integer("sliding_window", None))
    rope = read_rope(config, read_heads(config)[2], has_query_growth=True)
    if rope.kind is not RopeKind.YARN:
        raise config.error("rope_parameters", f"must be of type yarn for this architecture, not {rope.kind}")
    return replace(model, max_sequence_length=min(model.max_sequence_length, rope.original_max_position))


def _read_mistral(config: Section, family: str, architecture: str, window: int | None) -> ModelConfig:
    refuse_unknown_mathematics(config)
    norm = read_norm(config)
    rope = read_rope(config, read_heads(config)[2], has_query_growth=family == "ministral3")
    layer = LayerSpec(read_attention(config, rope=rope, window=window), read_dense(config), norm)
    return assemble(config, family, architecture, [layer] * read_n_layers(config), norm=norm)


def read_smollm3(config: Section, architecture: str) -> ModelConfig:
    """As Llama, but every fourth layer has no rope (and may have a window)."""
    refuse_unknown_mathematics(config)
    n_layers = read_n_layers(config)
    has_rope = _smollm3_rope_layers(config, n_layers)
    window = config.integer("sliding_window", None) if config.boolean("use_sliding_window", False) else None
    types = read_layer_types(
        config,
        n_layers,
        ["full_attention" if rope or window is None else "sliding_attention" for rope in has_rope],
        ["full_attention", "sliding_attention"],
    )
    norm = read_norm(config)
    bias = config.boolean("attention_bias", False)
    rope = read_rope(config, read_heads(config)[2], default_theta=2e6)
    dense = read_dense(config, bias=config.boolean("mlp_bias", False))
    layers = [
        LayerSpec(
            read_attention(
                config,
                rope=rope if rotates else None,
                window=window if kind == "sliding_attention" else None,
                qkv_bias=bias,
                output_bias=bias,
            ),
            dense,
            norm,
        )
        for rotates, kind in zip(has_rope, types, strict=True)
    ]
    return assemble(config, "smollm3", architecture, layers, norm=norm, tied_by_default=True)


def _smollm3_rope_layers(config: Section, n_layers: int) -> list[bool]:
    """`no_rope_layers` has, against its name, a 1 where a layer has rope."""
    interval = config.integer("no_rope_layer_interval", 4)
    flags = config.integers("no_rope_layers", tuple(int((i + 1) % interval != 0) for i in range(n_layers)))
    if len(flags) < n_layers:
        raise config.error("no_rope_layers", f"has {len(flags)} entries for {n_layers} layers")
    return [flag != 0 for flag in flags[:n_layers]]


FAMILIES = (
    Family("llama", ("llama",), ("LlamaForCausalLM", "LlavaForConditionalGeneration"), read_llama),
    Family("mistral", ("mistral",), ("MistralForCausalLM", "Mistral3ForConditionalGeneration"), read_mistral),
    Family(
        "ministral3",
        ("ministral3",),
        ("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
        read_ministral3,
    ),
    Family("smollm3", ("smollm3",), ("SmolLM3ForCausalLM",), read_smollm3),
)
