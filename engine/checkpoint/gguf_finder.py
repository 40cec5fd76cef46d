"""Finds weights in GGUF files: their names there, stacked experts, and llama-style permuted rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.resolve import Found, matches_any
from engine.checkpoint.tensor import SourceTensor, Tensor
from engine.config import AttentionSpec, ModelConfig
from engine.quantization.tensor_type import TensorType

_NAMES = {
    "embedding.weight": "token_embd.weight",
    "final_norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
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
    "moe.experts.gate": "ffn_gate_exps",
    "moe.experts.up": "ffn_up_exps",
    "moe.experts.down": "ffn_down_exps",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+?)(\.weight|\.bias)?")
_EXPERT = re.compile(r"experts\.(\d+)\.")
_NOT_NEEDED = (
    re.compile(r"^rope_(freqs|factors_long|factors_short)\.weight$"),
    re.compile(r"\.rope_freqs\."),
)

PERMUTED_ARCHITECTURES = frozenset({"llama"})
"""Their q and k rows are interleaved so that rope pairs lie side by side; undone here."""


class GgufFinder:
    """Looks in the tensors of one GGUF file."""

    def __init__(self, config: ModelConfig, sources: Mapping[str, SourceTensor]) -> None:
        self._config = config
        self._sources = sources
        self._is_permuted = config.architecture in PERMUTED_ARCHITECTURES

    def find(self, canonical: str, shape: tuple[int, ...]) -> Found | None:
        name, expert = _gguf_name(canonical)
        source = self._sources.get(name)
        if source is None:
            return None
        problem = self._check(source, shape, expert, canonical)
        heads = self._permuted_heads(canonical) if self._is_permuted else None
        load = partial(_load, canonical, source, shape, expert or 0, heads)
        return Found(load, str(source.type), (name,), problem)

    def file_name(self, canonical: str) -> str:
        return _gguf_name(canonical)[0]

    def not_needed(self, source: str) -> bool:
        return (source == "output.weight" and self._config.tied_embeddings) or matches_any(
            source, _NOT_NEEDED
        )

    def _check(
        self, source: SourceTensor, shape: tuple[int, ...], expert: int | None, canonical: str
    ) -> str | None:
        stored = source.shape
        if expert is not None:
            feed_forward = self._config.layers[int(canonical.split(".")[1])].feed_forward
            shape = (getattr(feed_forward, "n_experts", 0), *shape)
        if not isinstance(source.type, TensorType):
            known = ", ".join(t.name for t in TensorType if t is not TensorType.F8_E4M3)
            return f"tensor {source.name!r} has the type {source.type}; supported are {known}"
        if stored != shape:
            return f"tensor {source.name!r} has shape {list(stored)} where {list(shape)} is needed"
        return None

    def _permuted_heads(self, canonical: str) -> int | None:
        """Heads whose rows are to be put back in order; None for other tensors."""
        layer = _LAYER.fullmatch(canonical)
        if layer is None or layer.group(2) not in ("attention.q", "attention.k"):
            return None
        mixer = self._config.layers[int(layer.group(1))].mixer
        if not isinstance(mixer, AttentionSpec):
            return None
        return mixer.n_heads if layer.group(2) == "attention.q" else mixer.n_kv_heads


def _gguf_name(canonical: str) -> tuple[str, int | None]:
    """(the tensor's name in the file, which expert of it)."""
    layer = _LAYER.fullmatch(canonical)
    if layer is None:
        return _NAMES[canonical], None
    stem, suffix = layer.group(2), layer.group(3) or ""
    expert = _EXPERT.search(stem)
    stem = _EXPERT.sub("experts.", stem)
    name = f"blk.{layer.group(1)}.{_NAMES.get(stem, stem)}{suffix}"
    return name, None if expert is None else int(expert.group(1))


def _load(
    canonical: str, source: SourceTensor, shape: tuple[int, ...], expert: int, heads: int | None
) -> Tensor:
    n_rows = shape[0] if len(shape) > 1 else 1
    tensor_type = TensorType(source.type)
    rows = source.read().reshape(-1, tensor_type.row_bytes(shape[-1]))
    tensor = Tensor(canonical, tensor_type, shape, rows[expert * n_rows : (expert + 1) * n_rows])
    if heads is None:
        return tensor
    if len(shape) == 1:
        elements = tensor.data.reshape(shape[0], tensor_type.block_bytes)
        return replace(tensor, data=_in_order(elements, heads).reshape(1, -1))
    return replace(tensor, data=_in_order(tensor.data, heads))


def _in_order(rows: NDArray[np.uint8], heads: int) -> NDArray[np.uint8]:
    """Row 2j + h of a head, as stored, is row j + h · head_dim/2 (h = 0, 1). A copy."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
