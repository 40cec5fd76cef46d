"""Finds weights in Hugging Face files: prefixes, head, fused experts, FP8 scales."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.naming import hf_name
from engine.checkpoint.resolve import Found, matches_any
from engine.checkpoint.tensor import SourceTensor, Tensor
from engine.config import ModelConfig, WeightFormat, WeightScheme
from engine.errors import CheckpointError
from engine.quantization.decode import decode
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
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)\.weight")


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
        expert = _EXPERT.fullmatch(canonical)
        source = self._sources.get(self.file_name(canonical))
        if source is not None:
            return self._plain(canonical, source, shape)
        if expert is not None:
            return self._from_fused(canonical, shape, expert.group(1), int(expert.group(2)), expert.group(3))
        return None

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
        problem = check(source, stored, shape, scale, self._config.weight_format)
        names = (source.name,) if scale is None else (source.name, scale.name)
        load = partial(load_tensor, canonical, source, shape, scale, self._config.weight_format)
        return Found(load, str(source.type), names, problem)

    def _scale_of(self, weight: str) -> SourceTensor | None:
        """The scale beside an FP8 weight: `weight_scale_inv` multiplies just as `weight_scale` does."""
        names = (f"{weight}_scale_inv", f"{weight}_scale")
        return next((self._sources[name] for name in names if name in self._sources), None)

    def _from_fused(
        self, canonical: str, shape: tuple[int, ...], experts: str, index: int, part: str
    ) -> Found | None:
        """One expert out of [experts, 2 · intermediate, hidden] (gate over up) or [experts, hidden, …]."""
        stem = self.prefix + hf_name(f"{experts}.0.{part}", self._own).rpartition(".0.")[0]
        name = f"{stem}.{'down_proj' if part == 'down' else 'gate_up_proj'}"
        source = self._sources.get(name)
        if source is None:
            return None
        n_experts = self._n_experts(experts)
        rows, columns = shape
        fused = (n_experts, rows if part == "down" else 2 * rows, columns)
        scale = self._scale_of(source.name)
        names = (source.name,) if scale is None else (source.name, scale.name)
        problem = check(source, source.shape, fused, None, self._config.weight_format)
        if problem is None and scale is not None:
            problem = f"tensor {name!r} is fused and FP8, which is not supported"
        first_row = index * fused[1] + (rows if part == "up" else 0)
        load = partial(load_rows, canonical, source, shape, first_row)
        return Found(load, str(source.type), names, problem)

    def _n_experts(self, experts: str) -> int:
        layer = self._config.layers[int(experts.split(".")[1])]
        return getattr(layer.feed_forward, "n_experts", 0)


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
    weight_format: WeightFormat,
) -> str | None:
    """A sentence about what is wrong with a weight, if anything is."""
    if stored != shape:
        return f"tensor {source.name!r} has shape {list(source.shape)} where {list(shape)} is needed"
    if not isinstance(source.type, TensorType):
        return f"tensor {source.name!r} has the unusable type {source.type}"
    if source.type is TensorType.F8_E4M3:
        if scale is None:
            return f"tensor {source.name!r} is FP8 but has no scale beside it"
        if scale_layout(scale, shape, weight_format) is None:
            return f"tensor {scale.name!r} of shape {list(scale.shape)} does not fit {list(shape)} as a scale"
    elif scale is not None:
        return f"tensor {source.name!r} of type {source.type} has a scale, which only FP8 weights may have"
    return None


def scale_layout(
    scale: SourceTensor, shape: tuple[int, ...], weight_format: WeightFormat
) -> tuple[tuple[int, int], tuple[int, int] | None] | None:
    """(shape of the scale as a matrix, its block or None) of a known layout; None if it fits none."""
    if scale.type not in (TensorType.F32, TensorType.BF16, TensorType.F16) or len(shape) != 2:
        return None
    rows, columns = shape
    if scale.shape in ((), (1,)):
        return (1, 1), None
    if scale.shape in ((rows,), (rows, 1)):
        return (rows, 1), None
    if weight_format.scheme is WeightScheme.FP8_BLOCK and weight_format.block is not None:
        block = weight_format.block
        blocks = (-(-rows // block[0]), -(-columns // block[1]))
        if scale.shape == blocks:
            return blocks, block
    return None


def load_tensor(
    canonical: str,
    source: SourceTensor,
    shape: tuple[int, ...],
    scale: SourceTensor | None,
    weight_format: WeightFormat,
) -> Tensor:
    tensor_type = TensorType(source.type)
    data = source.read().reshape(shape[0] if len(shape) > 1 else 1, -1)
    if scale is None:
        return Tensor(canonical, tensor_type, shape, data)
    layout = scale_layout(scale, shape, weight_format)
    if layout is None:
        raise CheckpointError(f"tensor {scale.name!r} does not fit as a scale")
    values = read_vector(scale).reshape(layout[0])
    return Tensor(canonical, tensor_type, shape, data, values, layout[1])


def load_rows(canonical: str, source: SourceTensor, shape: tuple[int, ...], first_row: int) -> Tensor:
    """Rows first_row … of a fused tensor whose last dimension is the columns."""
    data = source.read().reshape(-1, TensorType(source.type).row_bytes(shape[1]))
    return Tensor(canonical, TensorType(source.type), shape, data[first_row : first_row + shape[0]])


def read_vector(source: SourceTensor) -> NDArray[np.float32]:
    """A small plain tensor, float32 [n]."""
    return decode(source.read().reshape(1, -1), TensorType(source.type)).reshape(-1)
