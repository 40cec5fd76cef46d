"""Finds weights in Hugging Face files: prefixes, head, fused experts, FP8 scales."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from engine.checkpoint.naming import CanonicalName, hf_name, parse
from engine.checkpoint.resolve import Found, matches_any
from engine.checkpoint.scales import ScaleLayout, is_scale, read_scale, scale_layout
from engine.checkpoint.tensor import SourceTensor, Tensor
from engine.config import ModelConfig, WeightFormat
from engine.errors import CheckpointError
from engine.quantization.tensor_type import TensorType

PREFIXES = ("model.language_model.", "language_model.model.", "model.", "language_model.", "")
"""Where the decoder's tensors may sit; probed in this order."""

_NOT_NEEDED = tuple(
    re.compile(pattern)
    for pattern in (
        r"rotary_emb\.inv_freq$",
        r"\.masked_bias$",
        r"^(model\.)?(visual|vision_tower|vision_model|audio_tower|embed_vision|embed_audio)\.",
        r"^(model\.)?(multi_modal_projector|patch_merger|vision_language_adapter)\.",
        r"^(model\.)?(language_model\.)?mtp\.",
        r"\.(input_scale|activation_scale|k_scale|v_scale|kv_scale|input_global_scale)$",
    )
)


class HfFinder:
    """Looks in the tensors of one folder. Raises CheckpointError at once if there is no decoder."""

    def __init__(
        self, config: ModelConfig, sources: Mapping[str, SourceTensor], own: Mapping[str, str]
    ) -> None:
        self._config = config
        self._sources = sources
        self._own = own
        embedding = hf_name("embedding.weight", own)
        prefix = next((p for p in PREFIXES if p + embedding in sources), None)
        if prefix is None:
            places = ", ".join(p + embedding for p in PREFIXES)
            raise CheckpointError(f"no token embedding found; looked for {places}")
        self.prefix = prefix
        self.embedding = prefix + embedding
        self.head = find_head(sources, prefix)

    def find(self, canonical: str, shape: tuple[int, ...]) -> Found | None:
        if canonical == "head.weight":
            return None if self.head is None else self._plain(canonical, self._sources[self.head], shape)
        source = self._sources.get(self.file_name(canonical))
        if source is not None:
            return self._plain(canonical, source, shape)
        name = parse(canonical)
        return None if name.expert is None else self._from_fused(canonical, shape, name)

    def file_name(self, canonical: str) -> str:
        if canonical == "head.weight":
            return "lm_head.weight"
        return self.prefix + hf_name(canonical, self._own)

    def not_needed(self, source: str) -> bool:
        return source == self.head or matches_any(source, _NOT_NEEDED)

    def _plain(self, canonical: str, source: SourceTensor, shape: tuple[int, ...]) -> Found:
        stored = source.shape
        if canonical.endswith("conv.weight") and len(stored) == 3 and stored[1] == 1:
            stored = (stored[0], stored[2])
        if stored == () and shape == (1,):
            stored = (1,)
        scale = self._scale_of(source.name)
        layout = None
        if scale is not None and len(shape) == 2:
            layout = scale_layout(scale.shape, (shape[0], shape[1]), self._config.weight_format)
        problem = check(source, stored, shape, scale, layout)
        names = (source.name,) if scale is None else (source.name, scale.name)
        load = partial(_load, canonical, source, shape, scale, layout)
        return Found(load, names, problem)

    def _scale_of(self, weight: str) -> SourceTensor | None:
        """The scale beside an FP8 weight: `weight_scale_inv` multiplies just as `weight_scale` does."""
        names = (f"{weight}_scale_inv", f"{weight}_scale")
        return next((self._sources[name] for name in names if name in self._sources), None)

    def _from_fused(self, canonical: str, shape: tuple[int, ...], name: CanonicalName) -> Found | None:
        """One expert out of [experts, 2 · intermediate, hidden] (gate over up) or [experts, hidden, …]."""
        part = name.stem.rpartition(".")[2]
        stem = self.file_name(canonical).rpartition(f".{name.expert}.")[0]
        source = self._sources.get(f"{stem}.{'down_proj' if part == 'down' else 'gate_up_proj'}")
        if source is None or name.layer is None or name.expert is None:
            return None
        rows, columns = shape
        n_experts = getattr(self._config.layers[name.layer].feed_forward, "n_experts", 0)
        fused = (n_experts, rows if part == "down" else 2 * rows, columns)
        place = _Place(name.expert, fused[1], rows if part == "up" else 0)
        scale = self._scale_of(source.name)
        names = (source.name,) if scale is None else (source.name, scale.name)
        layout = None if scale is None else _expert_layout(scale, fused, self._config.weight_format)
        if layout is not None and not layout.can_split_at(place.first):
            layout = None
        problem = check(source, source.shape, fused, scale, layout)
        load = partial(_load_expert, canonical, source, (rows, columns), place, scale, layout)
        return Found(load, names, problem)


def find_head(sources: Mapping[str, SourceTensor], prefix: str) -> str | None:
    """The head's name in the file, wherever it stands: at the top, beside the decoder or inside it."""
    beside = prefix.removesuffix("model.") if prefix.endswith("model.") else prefix
    places = ("lm_head.weight", f"{beside}lm_head.weight", f"{prefix}lm_head.weight", "model.lm_head.weight")
    return next((name for name in places if name in sources), None)


def check(
    source: SourceTensor,
    stored: tuple[int, ...],
    shape: tuple[int, ...],
    scale: SourceTensor | None,
    layout: ScaleLayout | None,
) -> str | None:
    """A sentence about what is wrong with a weight, if anything is."""
    if stored != shape:
        return f"tensor {source.name!r} has shape {list(source.shape)} where {list(shape)} is needed"
    if not isinstance(source.type, TensorType):
        return f"tensor {source.name!r} has the unusable type {source.type}"
    if source.type is not TensorType.F8_E4M3:
        return (
            None if scale is None else f"tensor {source.name!r} of type {source.type} must not have a scale"
        )
    if scale is None:
        return f"tensor {source.name!r} is FP8 but has no scale beside it"
    if layout is None or not is_scale(scale):
        return (
            f"tensor {scale.name!r} of type {scale.type} and shape {list(scale.shape)} does not fit "
            f"{source.name!r} of shape {list(shape)} as a scale"
        )
    return None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an expert's matrix lies in a fused tensor."""

    expert: int
    rows_per_expert: int
    first: int
    """Its first row among the expert's."""


def _load(
    canonical: str,
    source: SourceTensor,
    shape: tuple[int, ...],
    scale: SourceTensor | None,
    layout: ScaleLayout | None,
) -> Tensor:
    data = source.read().reshape(shape[0] if len(shape) > 1 else 1, -1)
    if scale is None or layout is None:
        return Tensor(canonical, TensorType(source.type), shape, data)
    values = read_scale(scale).reshape(layout.shape)
    return Tensor(canonical, TensorType(source.type), shape, data, values, layout.block)


def _expert_layout(
    scale: SourceTensor, fused: tuple[int, int, int], weight_format: WeightFormat
) -> ScaleLayout | None:
    """Scales of fused experts have the experts first, or are one for all."""
    of_one = scale.shape[1:] if scale.shape[:1] == fused[:1] and fused[0] > 1 else scale.shape
    return scale_layout(of_one, fused[1:], weight_format)


def _load_expert(
    canonical: str,
    source: SourceTensor,
    shape: tuple[int, int],
    place: _Place,
    scale: SourceTensor | None,
    layout: ScaleLayout | None,
) -> Tensor:
    """The rows of one expert, of which the last dimension is the columns."""
    data = source.read().reshape(-1, TensorType(source.type).row_bytes(shape[1]))
    first = place.expert * place.rows_per_expert + place.first
    tensor = Tensor(canonical, TensorType(source.type), shape, data[first : first + shape[0]])
    if scale is None or layout is None:
        return tensor
    all_scales = read_scale(scale).reshape(-1, *layout.shape)
    own = all_scales[place.expert if len(all_scales) > 1 else 0]
    return replace(tensor, scale=layout.rows(own, place.first, shape[0]), scale_block=layout.block)
