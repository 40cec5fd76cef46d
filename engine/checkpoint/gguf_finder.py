"""Finds weights in GGUF files: their names there, stacked experts, and llama-style permuted rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.naming import CanonicalName, gguf_name, parse
from engine.checkpoint.resolve import Found, matches_any
from engine.checkpoint.tensor import SourceTensor, Tensor
from engine.config import AttentionSpec, ModelConfig
from engine.quantization.tensor_type import TensorType

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
        source = self._sources.get(gguf_name(canonical))
        if source is None:
            return None
        name = parse(canonical)
        problem = self._check(source, shape, name)
        heads = self._permuted_heads(name) if self._is_permuted else None
        load = partial(_load, canonical, source, shape, name.expert or 0, heads)
        return Found(load, (source.name,), problem)

    def file_name(self, canonical: str) -> str:
        return gguf_name(canonical)

    def not_needed(self, source: str) -> bool:
        return (source == "output.weight" and self._config.tied_embeddings) or matches_any(
            source, _NOT_NEEDED
        )

    def _check(self, source: SourceTensor, shape: tuple[int, ...], name: CanonicalName) -> str | None:
        if not isinstance(source.type, TensorType):
            known = ", ".join(t.name for t in TensorType if t is not TensorType.F8_E4M3)
            return f"tensor {source.name!r} has the type {source.type}; supported are {known}"
        if name.expert is not None and name.layer is not None:
            feed_forward = self._config.layers[name.layer].feed_forward
            shape = (getattr(feed_forward, "n_experts", 0), *shape)
        if source.shape != shape:
            return f"tensor {source.name!r} has shape {list(source.shape)} where {list(shape)} is needed"
        return None

    def _permuted_heads(self, name: CanonicalName) -> int | None:
        """Heads whose rows are to be put back in order; None for other tensors."""
        if name.layer is None or name.stem not in ("attention.q", "attention.k"):
            return None
        mixer = self._config.layers[name.layer].mixer
        if not isinstance(mixer, AttentionSpec):
            return None
        return mixer.n_heads if name.stem == "attention.q" else mixer.n_kv_heads


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
