"""A model's weights as they lie on the device: which there are, of what shape, made of which tensors.

Matrices that read the same input are merged (q|k|v, gate|up), one under the other. Linear layers are held in
the tier's precision, all else in bf16. Reads no file and needs no GPU; weight_loading fills what is laid out
here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from engine.config import AttentionSpec, DenseSpec, LayerSpec, ModelConfig, expected_tensors
from engine.cuda.memory import Arena, Layout
from engine.errors import UnsupportedModelError
from engine.options import Precision
from kernels.fp8 import Fp8Rows
from kernels.q4 import Q4Tiles, tile_shapes
from kernels.tensor import DType, Tensor

PART = "weights"
"""What weights count as in the memory plan."""

Weight = Tensor | Q4Tiles | Fp8Rows
"""A matrix [n, k] in bf16, in q4_0 or in FP8."""


@dataclass(frozen=True, slots=True)
class DeviceWeight:
    """A weight on the device, and the checkpoint's tensors that fill it."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    """Canonical names; their rows follow one another."""
    precision: Precision = Precision.BF16
    """BF16, or for linear layers Q4 or FP8."""

    def tensors(self) -> dict[str, tuple[tuple[int, ...], DType]]:
        """Shapes and types of what it takes in the arena, by name there."""
        if self.precision is Precision.Q4:
            n, k = self.shape
            return {f"{self.name}.{field}": form for field, form in tile_shapes(n, k).items()}
        if self.precision is Precision.FP8:
            return {
                f"{self.name}.values": (self.shape, DType.E4M3),
                f"{self.name}.scale": (self.shape[:1], DType.F32),
            }
        return {self.name: (self.shape, DType.BF16)}

    def found_in(self, arena: Arena) -> Weight:
        """What reserve_weights reserved for it."""
        tensors = [arena.tensor(name) for name in self.tensors()]
        if self.precision is Precision.Q4:
            n, k = self.shape
            return Q4Tiles(tensors[0], tensors[1], n, k)
        if self.precision is Precision.FP8:
            return Fp8Rows(tensors[0], tensors[1])
        return tensors[0]

    @property
    def bytes(self) -> int:
        """On the device, gaps for alignment apart."""
        return sum(prod(shape) * dtype.bytes for shape, dtype in self.tensors().values())

    def group(self) -> str:
        """What it belongs to: "embedding", "attention", "feed-forward", "head", or "norms" with biases."""
        if not self.name.startswith("layers."):
            return "norms" if "norm" in self.name else self.name.split(".")[0]
        if len(self.shape) < 2:
            return "norms"
        return self.name.split(".")[2].replace("_", "-")


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """y = x · weightᵀ + bias."""

    weight: Weight
    """[n, k]."""
    bias: Tensor | None
    """bf16 [n]."""


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    qkv: LinearWeights
    """Rows: q (head by head; with an output gate each head's query, then its gate), k, v (unless v is k)."""
    o: LinearWeights
    q_norm: Tensor | None
    """bf16 [head_dim]."""
    k_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class DenseWeights:
    gate_up: LinearWeights
    """Rows: gate, then up."""
    down: LinearWeights


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: Tensor
    """bf16 [hidden], as stored: NormSpec.weight_offset is not added."""
    mixer: AttentionWeights
    post_mixer_norm: Tensor | None
    feed_forward_norm: Tensor
    feed_forward: DenseWeights
    post_feed_forward_norm: Tensor | None
    scalar: Tensor | None
    """bf16 [1]."""


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: Tensor
    """bf16 [vocab, hidden]."""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor | Q4Tiles
    """[vocab, hidden]: q4_0 in the q4 tier, else bf16, and then the embedding itself if tied."""


def device_weights(config: ModelConfig, precision: Precision = Precision.BF16) -> tuple[DeviceWeight, ...]:
    """Every weight on the device, in the order a forward pass meets them.

    precision: the tier, not AUTO. Raises UnsupportedModelError, naming the layer's kind, for mixers and
    feed-forwards without a layout yet; ValueError for a matrix that the tier cannot hold
    (features.require_supported refuses those first).
    """
    shapes = expected_tensors(config)
    shapes.setdefault("head.weight", shapes["embedding.weight"])
    return tuple(_merged(name, parts, shapes, precision) for name, parts in _names(config, precision))


def reserve_weights(config: ModelConfig, layout: Layout, precision: Precision = Precision.BF16) -> None:
    """Reserves all weights in an arena's layout. Raises UnsupportedModelError."""
    for weight in device_weights(config, precision):
        for name, (shape, dtype) in weight.tensors().items():
            layout.add(PART, name, shape, dtype)


def weights_in(arena: Arena, config: ModelConfig, precision: Precision = Precision.BF16) -> ModelWeights:
    """The reserved weights, by what they are for."""
    found = _Found({weight.name: weight.found_in(arena) for weight in device_weights(config, precision)})
    embedding = found.tensor("embedding.weight")
    head = found.weights.get("head.weight", embedding)
    assert not isinstance(head, Fp8Rows)
    return ModelWeights(
        embedding=embedding,
        layers=tuple(_layer(found, f"layers.{i}.") for i in range(config.n_layers)),
        final_norm=found.tensor("final_norm.weight"),
        head=head,
    )


def tensors_of(weight: Weight) -> tuple[Tensor, ...]:
    """What a weight consists of."""
    if isinstance(weight, Tensor):
        return (weight,)
    if isinstance(weight, Q4Tiles):
        return weight.quants, weight.scales
    return weight.values, weight.scale


def _names(config: ModelConfig, precision: Precision) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(device name, canonical names), for all weights.

    The q4 tier has a head of its own even if it is tied: q4_0 for the logits, beside the bf16 embedding that
    tokens are looked up in. That costs 0.5625 bytes an element more, and moves 2 bytes fewer a step.
    """
    yield "embedding.weight", ("embedding.weight",)
    for index, layer in enumerate(config.layers):
        for name, parts in _layer_names(layer):
            yield f"layers.{index}.{name}", tuple(f"layers.{index}.{part}" for part in parts)
    yield "final_norm.weight", ("final_norm.weight",)
    if not config.tied_embeddings or precision is Precision.Q4:
        yield "head.weight", ("head.weight",)


def _layer_names(layer: LayerSpec) -> Iterator[tuple[str, tuple[str, ...]]]:
    mixer, feed_forward = layer.mixer, layer.feed_forward
    if not isinstance(mixer, AttentionSpec) or not isinstance(feed_forward, DenseSpec):
        kinds = ", ".join(
            spec.kind for spec in (mixer, feed_forward) if not isinstance(spec, AttentionSpec | DenseSpec)
        )
        raise UnsupportedModelError(
            f"The CUDA engine has no {kinds} layers yet; it runs attention and dense feed-forward layers."
        )
    yield _alone("input_norm.weight")
    yield from _attention_names(mixer)
    if layer.post_norms:
        yield _alone("post_mixer_norm.weight")
    yield _alone("feed_forward_norm.weight")
    yield from _linear("feed_forward", "gate_up", ("gate", "up"), feed_forward.bias)
    yield from _linear("feed_forward", "down", ("down",), feed_forward.bias)
    if layer.post_norms:
        yield _alone("post_feed_forward_norm.weight")
    if layer.has_scalar:
        yield _alone("scalar")


def _attention_names(mixer: AttentionSpec) -> Iterator[tuple[str, tuple[str, ...]]]:
    projections = ("q", "k") if mixer.v_from_k else ("q", "k", "v")
    yield from _linear("attention", "qkv", projections, mixer.qkv_bias)
    if mixer.qk_norm is not None:
        yield _alone("attention.q_norm.weight")
        yield _alone("attention.k_norm.weight")
    yield from _linear("attention", "o", ("o",), mixer.output_bias)


def _linear(
    group: str, name: str, parts: tuple[str, ...], bias: bool
) -> Iterator[tuple[str, tuple[str, ...]]]:
    for kind in ("weight", "bias") if bias else ("weight",):
        yield f"{group}.{name}.{kind}", tuple(f"{group}.{part}.{kind}" for part in parts)


def _alone(name: str) -> tuple[str, tuple[str, ...]]:
    return name, (name,)


def _merged(
    name: str, parts: tuple[str, ...], shapes: dict[str, tuple[int, ...]], tier: Precision
) -> DeviceWeight:
    rows = sum(shapes[part][0] for part in parts)
    shape = (rows, *shapes[parts[0]][1:])
    return DeviceWeight(name, shape, parts, _precision_of(name, shape, tier))


def _precision_of(name: str, shape: tuple[int, ...], tier: Precision) -> Precision:
    """Only matrices that are multiplied by are held in the tier's precision; of the heads, only q4's."""
    is_linear = len(shape) == 2 and name.startswith("layers.")
    if is_linear or (name == "head.weight" and tier is Precision.Q4):
        return tier
    return Precision.BF16


@dataclass(frozen=True, slots=True)
class _Found:
    """Weights on the device by name."""

    weights: dict[str, Weight]

    def tensor(self, name: str) -> Tensor:
        weight = self.weights[name]
        assert isinstance(weight, Tensor)
        return weight

    def optional(self, name: str) -> Tensor | None:
        return self.tensor(name) if name in self.weights else None

    def linear(self, name: str) -> LinearWeights:
        return LinearWeights(self.weights[f"{name}.weight"], self.optional(f"{name}.bias"))


def _layer(found: _Found, prefix: str) -> LayerWeights:
    return LayerWeights(
        input_norm=found.tensor(f"{prefix}input_norm.weight"),
        mixer=AttentionWeights(
            qkv=found.linear(f"{prefix}attention.qkv"),
            o=found.linear(f"{prefix}attention.o"),
            q_norm=found.optional(f"{prefix}attention.q_norm.weight"),
            k_norm=found.optional(f"{prefix}attention.k_norm.weight"),
        ),
        post_mixer_norm=found.optional(f"{prefix}post_mixer_norm.weight"),
        feed_forward_norm=found.tensor(f"{prefix}feed_forward_norm.weight"),
        feed_forward=DenseWeights(
            gate_up=found.linear(f"{prefix}feed_forward.gate_up"),
            down=found.linear(f"{prefix}feed_forward.down"),
        ),
        post_feed_forward_norm=found.optional(f"{prefix}post_feed_forward_norm.weight"),
        scalar=found.optional(f"{prefix}scalar"),
    )
