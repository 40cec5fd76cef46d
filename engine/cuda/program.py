"""A model's forward pass as a list of enqueue-able calls, built by walking its LayerSpecs.

A program is made for a number of rows and a kind of row (decode or prefill). Its calls hold addresses of
buffers planned before; running it allocates nothing. Which family a model came from it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from engine.config import Activation, AttentionSpec, DenseSpec, LayerSpec, ModelConfig, NormSpec
from engine.cuda.buffers import Buffers, part, tile_class
from engine.cuda.gemm import Epilogue, GemmKey
from engine.cuda.memory import Arena
from engine.cuda.weights import AttentionWeights, DenseWeights, LayerWeights, LinearWeights, ModelWeights
from kernels.activation import gated_activation
from kernels.attention_decode import attention_decode, plan_decode
from kernels.attention_prefill import attention_prefill, most_tiles
from kernels.device import DeviceLimits
from kernels.embedding import embed
from kernels.launch import KernelLibrary, Launch
from kernels.norm import add_rms_norm
from kernels.rope import rope_and_write
from kernels.skinny import MAX_FUSED_NORM_ROWS, Finish, FusedNorm, fits, skinny_product
from kernels.tensor import DType, Tensor

Call = Callable[[int], None]
"""Enqueues itself on a stream: a kernel launch or a matrix product of fixed buffers."""


class Plan(Protocol):
    """How to compute a product: a GemmPlan."""

    def bind(
        self,
        *,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        workspace: Tensor,
        bias: Tensor | None = None,
        c: Tensor | None = None,
    ) -> Call: ...


class Planner(Protocol):
    """Where matrix products come from: a GemmPlanner."""

    def plan(self, key: GemmKey) -> Plan: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What programs are built from."""

    config: ModelConfig
    weights: ModelWeights
    buffers: Buffers
    staging: Arena
    """The staging region on the device."""
    library: KernelLibrary
    limits: DeviceLimits
    planner: Planner
    skinny: bool
    """Own kernels, not cuBLASLt, for products of few rows."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of the residual stream."""

    weight: Tensor
    spec: NormSpec


class Rows(Protocol):
    """How rows of one kind find their tokens, positions and keys."""

    count: int

    def begin(self, residual: Tensor) -> list[Launch]:
        """Embeds the rows, and prepares what all layers share."""

    def attend(self, layer: int, mixer: AttentionSpec, weights: AttentionWeights) -> list[Launch]:
        """From the q|k|v product to the attention result."""


class _Attention:
    """What both kinds of rows do the same way."""

    def __init__(self, parts: Parts, count: int) -> None:
        self.count = count
        self._parts = parts
        self._activations = parts.buffers.activations

    def _heads(self, buffer: Tensor, mixer: AttentionSpec) -> Tensor:
        return part(buffer, self.count, mixer.q_dim).view(self.count, mixer.n_heads, mixer.head_dim)

    def _rope(
        self, layer: int, mixer: AttentionSpec, weights: AttentionWeights, row_slot: Tensor, **places: Tensor
    ) -> Launch:
        buffers = self._parts.buffers
        pages, table, norm = buffers.kv(layer), buffers.rope(mixer), mixer.qk_norm
        return rope_and_write(
            self._parts.library,
            qkv=part(self._activations.qkv, self.count, mixer.q_dim + 2 * mixer.kv_dim),
            cosines=table.cosines,
            sines=table.sines,
            row_slot=row_slot,
            block_table=buffers.block_table,
            q_out=self._heads(self._activations.query, mixer),
            k_pages=pages.k,
            v_pages=pages.v,
            bias=weights.qkv.bias,
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            epsilon=norm.eps if norm else 1e-6,
            norm_offset=norm.weight_offset if norm else 0.0,
            **places,
        )


class DecodeRows(_Attention):
    """One token of each of `count` slots: the last that it sampled, at the slot's position."""

    def __init__(self, parts: Parts, count: int) -> None:
        super().__init__(parts, count)
        self._row_slot = parts.staging.tensor("decode_slots").rows(0, count)

    def begin(self, residual: Tensor) -> list[Launch]:
        parts, slots = self._parts, self._parts.buffers.slots
        plan = parts.buffers.plan
        calls = [
            plan_decode(
                parts.library,
                row_slot=self._row_slot,
                slot_position=slots.position,
                slot_active=slots.active,
                plan=parts.buffers.decode_plan(key),
                splits=key.splits,
                window=key.window,
                min_pages=key.min_pages,
            )
            for key in dict.fromkeys(map(plan.plan_key, plan.mixers))
        ]
        tokens = embed(
            parts.library,
            table=parts.weights.embedding,
            out=residual,
            row_slot=self._row_slot,
            slot_token=slots.last_token,
            scale=parts.config.embedding_scale,
        )
        return [*calls, tokens]

    def attend(self, layer: int, mixer: AttentionSpec, weights: AttentionWeights) -> list[Launch]:
        parts, buffers = self._parts, self._parts.buffers
        slots, pages = buffers.slots, buffers.kv(layer)
        places = {"slot_position": slots.position, "slot_active": slots.active}
        attention = attention_decode(
            parts.library,
            parts.limits,
            query=self._heads(self._activations.query, mixer),
            k_pages=pages.k,
            v_pages=pages.v,
            block_table=buffers.block_table,
            plan=buffers.decode_plan(buffers.plan.plan_key(mixer)),
            workspace=buffers.decode_workspace(mixer),
            out=self._heads(self._activations.attended, mixer),
            splits=buffers.plan.splits(mixer),
            scale=mixer.scale,
        )
        return [self._rope(layer, mixer, weights, self._row_slot, **places), *attention]


class PrefillRows(_Attention):
    """Up to `count` prompt tokens of any number of sequences, segment after segment."""

    def __init__(self, parts: Parts, count: int) -> None:
        super().__init__(parts, count)
        self._row_slot = parts.staging.tensor("row_slot").rows(0, count)
        self._row_position = parts.staging.tensor("row_position").rows(0, count)

    def begin(self, residual: Tensor) -> list[Launch]:
        parts = self._parts
        tokens = parts.staging.tensor("tokens").rows(0, self.count)
        scale = parts.config.embedding_scale
        return [embed(parts.library, table=parts.weights.embedding, out=residual, tokens=tokens, scale=scale)]

    def attend(self, layer: int, mixer: AttentionSpec, weights: AttentionWeights) -> list[Launch]:
        parts, buffers = self._parts, self._parts.buffers
        pages, tiles_of = buffers.kv(layer), tile_class(parts.limits, mixer)
        index = buffers.plan.tile_classes.index(tiles_of)
        most = most_tiles(self.count, buffers.plan.sizes.slots, tiles_of.group, tiles_of.variant)
        attention = attention_prefill(
            parts.library,
            parts.limits,
            query=self._heads(self._activations.query, mixer),
            k_pages=pages.k,
            v_pages=pages.v,
            block_table=buffers.block_table,
            tiles=parts.staging.tensor(f"tiles.{index}").rows(0, most),
            n_tiles=parts.staging.tensor(f"n_tiles.{index}"),
            out=self._heads(self._activations.attended, mixer),
            scale=mixer.scale,
            window=mixer.window,
        )
        rope = self._rope(layer, mixer, weights, self._row_slot, row_position=self._row_position)
        return [rope, attention]


class Body:
    """From tokens to the residual stream behind the last layer; the final norm and the head come after."""

    def __init__(self, parts: Parts, rows: Rows) -> None:
        self._parts = parts
        self._rows = rows
        self._activations = parts.buffers.activations
        self._residual = self._activations.residual.rows(0, rows.count)
        self._normed = self._activations.normed.rows(0, rows.count)
        self._delta: Tensor | None = None
        self.calls: list[Call] = [*rows.begin(self._residual)]
        for index, (spec, weights) in enumerate(zip(parts.config.layers, parts.weights.layers, strict=True)):
            self._layer(index, spec, weights)

    @property
    def leaves_delta(self) -> bool:
        """Whether the last product still waits to be added to the residual stream."""
        return self._delta is not None

    def _layer(self, index: int, spec: LayerSpec, weights: LayerWeights) -> None:
        mixer, feed_forward = spec.mixer, spec.feed_forward
        assert isinstance(mixer, AttentionSpec)
        assert isinstance(feed_forward, DenseSpec)
        self._attention(index, mixer, Norm(weights.input_norm, spec.norm), weights.mixer)
        self._feed_forward(feed_forward, Norm(weights.feed_forward_norm, spec.norm), weights.feed_forward)

    def _attention(self, index: int, mixer: AttentionSpec, norm: Norm, weights: AttentionWeights) -> None:
        qkv = part(self._activations.qkv, self._rows.count, mixer.q_dim + 2 * mixer.kv_dim)
        if self._is_skinny(qkv, weights.qkv.weight):
            self._skinny(norm, weights.qkv.weight, qkv, Finish.STORE)
        else:
            self._norm(norm)
            self._product(self._normed, weights.qkv.weight, qkv)
        self.calls += self._rows.attend(index, mixer, weights)
        self._add_product(part(self._activations.attended, self._rows.count, mixer.q_dim), weights.o)

    def _feed_forward(self, spec: DenseSpec, norm: Norm, weights: DenseWeights) -> None:
        rows = self._rows.count
        activated = part(self._activations.activated, rows, spec.intermediate)
        has_kernel = spec.activation is Activation.SILU and not spec.bias
        if has_kernel and self._is_skinny(activated, weights.gate_up.weight, Finish.SWIGLU):
            self._skinny(norm, weights.gate_up.weight, activated, Finish.SWIGLU)
        else:
            gate_up = part(self._activations.gate_up, rows, 2 * spec.intermediate)
            self._norm(norm)
            self._product(self._normed, weights.gate_up.weight, gate_up, bias=weights.gate_up.bias)
            library = self._parts.library
            self.calls.append(
                gated_activation(library, gate_up=gate_up, out=activated, activation=spec.activation.value)
            )
        self._add_product(activated, weights.down)

    def _is_skinny(self, y: Tensor, weight: Tensor, finish: Finish = Finish.STORE) -> bool:
        """Whether a product without bias goes to an own kernel, not to cuBLASLt."""
        rows, n = y.shape
        return self._parts.skinny and fits(rows, n, weight.shape[1], finish)

    def _skinny(self, norm: Norm, weight: Tensor, y: Tensor, finish: Finish) -> None:
        """Of the normalised residual stream: in one launch for one row of a complete bf16 stream."""
        fused = None
        few = self._rows.count <= MAX_FUSED_NORM_ROWS
        if few and self._residual.dtype is DType.BF16 and self._delta is None:
            fused = FusedNorm(norm.weight, norm.spec.eps, norm.spec.weight_offset)
        else:
            self._norm(norm)
        x = self._residual if fused else self._normed
        library, limits = self._parts.library, self._parts.limits
        self.calls.append(skinny_product(library, limits, x=x, weight=weight, y=y, finish=finish, norm=fused))

    def _norm(self, norm: Norm) -> None:
        """Adds what the product before left, and normalises the residual stream."""
        launch = add_rms_norm(
            self._parts.library,
            residual=self._residual,
            weight=norm.weight,
            out=self._normed,
            epsilon=norm.spec.eps,
            delta=self._delta,
            weight_offset=norm.spec.weight_offset,
        )
        self._delta = None
        self.calls.append(launch)

    def _product(self, x: Tensor, weight: Tensor, y: Tensor, *, bias: Tensor | None = None) -> None:
        key = product_key(x.shape[0], weight.shape, biased=bias is not None)
        workspace = self._activations.workspace
        self.calls.append(
            self._parts.planner.plan(key).bind(x=x, w=weight, y=y, bias=bias, workspace=workspace)
        )

    def _add_product(self, x: Tensor, linear: LinearWeights) -> None:
        """Onto the residual stream: in the product's epilogue, or, if it has a bias, with the next norm."""
        if linear.bias is not None:
            self._delta = self._activations.delta.rows(0, self._rows.count)
            self._product(x, linear.weight, self._delta, bias=linear.bias)
            return
        if self._is_skinny(self._residual, linear.weight):
            library, limits, y = self._parts.library, self._parts.limits, self._residual
            self.calls.append(
                skinny_product(library, limits, x=x, weight=linear.weight, y=y, finish=Finish.ADD)
            )
            return
        key = add_product_key(x.shape[0], linear.weight.shape, self._residual.dtype)
        bound = self._parts.planner.plan(key).bind(
            x=x, w=linear.weight, y=self._residual, c=self._residual, workspace=self._activations.workspace
        )
        self.calls.append(bound)


def product_key(rows: int, weight: tuple[int, ...], *, biased: bool = False) -> GemmKey:
    """A product whose result stays bf16. weight: its shape [n, k]."""
    n, k = weight
    return GemmKey(rows, n, k, epilogue=Epilogue.BIAS if biased else Epilogue.NONE)


def add_product_key(rows: int, weight: tuple[int, ...], residual: DType) -> GemmKey:
    """A product added to the residual stream."""
    n, k = weight
    return GemmKey(rows, n, k, y=residual, epilogue=Epilogue.ADD)


def head_key(rows: int, config: ModelConfig) -> GemmKey:
    """Logits are float32: bf16 would make ties among the most likely tokens."""
    return GemmKey(rows, config.vocab_size, config.hidden_size, y=DType.F32)


class KeyCollector:
    """A planner for programs that are built for the keys of their products alone."""

    def __init__(self) -> None:
        self.keys: dict[GemmKey, None] = {}

    def plan(self, key: GemmKey) -> KeyCollector:
        self.keys[key] = None
        return self

    def bind(self, **operands: Tensor | None) -> Call:
        return _nothing


def _nothing(stream: int) -> None:
    """Never enqueued."""


def distinct_layers(parts: Parts) -> Parts:
    """The same model with one layer of each kind: enough to learn the keys of all products."""
    layers = dict(zip(parts.config.layers, parts.weights.layers, strict=True))
    return replace(
        parts,
        config=replace(parts.config, layers=tuple(layers)),
        weights=replace(parts.weights, layers=tuple(layers.values())),
    )
