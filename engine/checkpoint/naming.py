"""Canonical tensor names to those in Hugging Face and GGUF files. Families state only where they differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_HF = {
    "embedding": "embed_tokens",
    "final_norm": "norm",
    "head": "lm_head",
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

_GGUF = {
    "embedding": "token_embd",
    "final_norm": "output_norm",
    "head": "output",
    "input_norm": "attn_norm",
    "feed_forward_norm": "ffn_norm",
    "post_mixer_norm": "post_attention_norm",
    "post_feed_forward_norm": "post_ffw_norm",
    "scalar": "layer_output_scale.weight",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.o": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "feed_forward.gate": "ffn_gate",
    "feed_forward.up": "ffn_up",
    "feed_forward.down": "ffn_down",
    "moe.router": "ffn_gate_inp",
    "moe.experts.{e}.gate": "ffn_gate_exps",
    "moe.experts.{e}.up": "ffn_up_exps",
    "moe.experts.{e}.down": "ffn_down_exps",
}

_PATTERN = re.compile(r"(?:layers\.(?P<layer>\d+)\.)?(?P<stem>.+?)(?P<suffix>\.weight|\.bias)?")
_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class CanonicalName:
    """A canonical name taken apart, see engine.config.tensors."""

    layer: int | None
    stem: str
    """Without layer and suffix; an expert's number is replaced by {e}."""
    expert: int | None
    suffix: str
    """".weight", ".bias" or nothing."""


def parse(canonical: str) -> CanonicalName:
    match = _PATTERN.fullmatch(canonical)
    if match is None:
        raise KeyError(canonical)
    expert = _EXPERT.search(match["stem"])
    return CanonicalName(
        layer=None if match["layer"] is None else int(match["layer"]),
        stem=_EXPERT.sub("{e}", match["stem"]),
        expert=None if expert is None else int(expert.group()),
        suffix=match["suffix"] or "",
    )


def hf_name(canonical: str, own: Mapping[str, str]) -> str:
    """The tensor's name below the decoder's prefix ("model." and the like); the head's has no prefix.

    `own` are the family's differences: stems to its names. Raises KeyError for a name that no table has.
    """
    name = parse(canonical)
    target = own.get(name.stem) or _HF[name.stem]
    layer = "" if name.layer is None else f"layers.{name.layer}."
    return f"{layer}{target.replace('{e}', str(name.expert))}{name.suffix}"


def gguf_name(canonical: str) -> str:
    """The tensor's name in a GGUF file; all experts of a layer share one. Raises KeyError as above."""
    name = parse(canonical)
    layer = "" if name.layer is None else f"blk.{name.layer}."
    return f"{layer}{_GGUF[name.stem]}{name.suffix}"
