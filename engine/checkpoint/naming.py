"""Canonical tensor names to those in Hugging Face files. Families state only where they differ."""

from __future__ import annotations

import re
from collections.abc import Mapping

_COMMON = {
    "embedding.weight": "embed_tokens.weight",
    "final_norm.weight": "norm.weight",
    "head.weight": "lm_head.weight",
    "input_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
    "moe.router": "mlp.gate",
    "moe.experts.{e}.gate": "mlp.experts.{e}.gate_proj",
    "moe.experts.{e}.up": "mlp.experts.{e}.up_proj",
    "moe.experts.{e}.down": "mlp.experts.{e}.down_proj",
    "moe.shared.gate": "mlp.shared_expert.gate_proj",
    "moe.shared.up": "mlp.shared_expert.up_proj",
    "moe.shared.down": "mlp.shared_expert.down_proj",
    "moe.shared_gate": "mlp.shared_expert_gate",
    "deltanet.qkv": "linear_attn.in_proj_qkv",
    "deltanet.z": "linear_attn.in_proj_z",
    "deltanet.b": "linear_attn.in_proj_b",
    "deltanet.a": "linear_attn.in_proj_a",
    "deltanet.conv": "linear_attn.conv1d",
    "deltanet.dt_bias": "linear_attn.dt_bias",
    "deltanet.a_log": "linear_attn.A_log",
    "deltanet.norm": "linear_attn.norm",
    "deltanet.out": "linear_attn.out_proj",
}

_LAYER = re.compile(r"layers\.(\d+)\.(.+?)(\.weight|\.bias)?")
_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")


def hf_name(canonical: str, own: Mapping[str, str]) -> str:
    """The tensor's name below the decoder's prefix ("model." and the like); the head's has no prefix.

    `own` are the family's differences: canonical names without layer and .weight → its names. Raises
    KeyError for a name that no table has.
    """
    layer = _LAYER.fullmatch(canonical)
    if layer is None:
        return own.get(canonical) or _COMMON[canonical]
    index, stem, suffix = layer.group(1), layer.group(2), layer.group(3) or ""
    expert = _EXPERT.search(stem)
    if expert is not None:
        stem = _EXPERT.sub("{e}", stem)
    name = own.get(stem) or _COMMON[stem]
    if expert is not None:
        name = name.replace("{e}", expert.group())
    return f"layers.{index}.{name}{suffix}"
