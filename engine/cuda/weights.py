"""A model's weights as they lie on the device: which there are, of what shape, made of which tensors.

Matrices that read the same input are merged (q|k|v, gate|up), one under the other. Reads no file and needs
no GPU; weight_loading fills what is laid out here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.config import AttentionSpec, DenseSpec, LayerSpec, ModelConfig, expected_tensors
from engine.cuda.memory import Arena, Layout
from engine.errors import UnsupportedModelError
from kernels.tensor import DType, Tensor

PART = "weights"
"""What weights count as in the memory plan."""


@dataclass(frozen=True, slots=True)
class DeviceWeight:
    """A tensor on the device, and the checkpoint's tensors that fill it. All are bf16."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    """Canonical names; their rows follow one another."""


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """y = x · weightᵀ + bias."""

    weight: Tensor
    """bf16 [n, k]."""
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
    head: Tensor
    """bf16 [vocab, hidden]; the embedding itself if tied."""


def device_weights(config: ModelConfig) -> tuple[DeviceWeight, ...]:
    """Every tensor on the device, in the order a forward pass meets them.

    Raises UnsupportedModelError, naming the layer's kind, for mixers and feed-forwards without a layout yet.
    """
    shapes = expected_tensors(config)
    return tuple(_merged(name, parts, shapes) for name, parts in _names(config))


def reserve_weights(config: ModelConfig, layout: Layout) -> None:
    """Reserves all weights in an arena's layout. Raises UnsupportedModelError."""
    for weight in device_weights(config):
        layout.add(PART, weight.name, weight.shape, DType.BF16)


def weights_in(arena: Arena, config: ModelConfig) -> ModelWeights:
    """The reserved tensors, by what they are for."""
    embedding = arena.tensor("embedding.weight")
    return ModelWeights(
        embedding=embedding,
        layers=tuple(_layer(arena, f"layers.{i}.") for i in range(config.n_layers)),
        final_norm=arena.tensor("final_norm.weight"),
        head=embedding if config.tied_embeddings else arena.tensor("head.weight"),
    )


def _names(config: ModelConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(device name, canonical names), for all weights."""
    yield "embedding.weight", ("embedding.weight",)
    for index, layer in enumerate(config.layers):
        for name, parts in _layer_names(layer):
            yield f"layers.{index}.{name}", tuple(f"layers.{index}.{part}" for part in parts)
    yield "final_norm.weight", ("final_norm.weight",)
    if not config.tied_embeddings:
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


def _merged(name: str, parts: tuple[str, ...], shapes: dict[str, tuple[int, ...]]) -> DeviceWeight:
    rows = sum(shapes[part][0] for part in parts)
    return DeviceWeight(name, (rows, *shapes[parts[0]][1:]), parts)


def _layer(arena: Arena, prefix: str) -> LayerWeights:
    def optional(name: str) -> Tensor | None:
        return arena.tensor(prefix + name) if prefix + name in arena else None

    def linear(name: str) -> LinearWeights:
        return LinearWeights(arena.tensor(f"{prefix}{name}.weight"), optional(f"{name}.bias"))

    return LayerWeights(
        input_norm=arena.tensor(f"{prefix}input_norm.weight"),
        mixer=AttentionWeights(
            qkv=linear("attention.qkv"),
            o=linear("attention.o"),
            q_norm=optional("attention.q_norm.weight"),
            k_norm=optional("attention.k_norm.weight"),
        ),
        post_mixer_norm=optional("post_mixer_norm.weight"),
        feed_forward_norm=arena.tensor(f"{prefix}feed_forward_norm.weight"),
        feed_forward=DenseWeights(gate_up=linear("feed_forward.gate_up"), down=linear("feed_forward.down")),
        post_feed_forward_norm=optional("post_feed_forward_norm.weight"),
        scalar=optional("scalar"),
    )
