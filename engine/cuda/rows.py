"""How rows of one kind find their tokens, positions and keys: decode rows and a prefill pass's rows.

Knows no layer's products.
"""

from __future__ import annotations

from typing import Protocol

from engine.config import AttentionSpec
from engine.cuda.buffers import part, tile_class
from engine.cuda.parts import Parts
from engine.cuda.products import Sums
from engine.cuda.weights import AttentionWeights
from kernels.attention_decode import attention_decode, plan_decode
from kernels.attention_prefill import attention_prefill, most_tiles
from kernels.attention_step import attention_step, serves
from kernels.embedding import embed
from kernels.launch import Launch
from kernels.rope import HeadInput, rope_and_write
from kernels.tensor import Tensor


class Rows(Protocol):
    """How rows of one kind find their tokens, positions and keys."""

    count: int

    def begin(self, residual: Tensor) -> list[Launch]:
        """Embeds the rows, and prepares what all layers share."""

    def attend(self, layer: int, mixer: AttentionSpec, weights: AttentionWeights, qkv: Sums) -> list[Launch]:
        """From the q|k|v product to the attention result, in `attended`."""


class _Attention:
    """What both kinds of rows do the same way."""

    def __init__(self, parts: Parts, count: int) -> None:
        self.count = count
        self._parts = parts
        self._activations = parts.buffers.activations

    def _heads(self, buffer: Tensor, mixer: AttentionSpec) -> Tensor:
        return part(buffer, self.count, mixer.q_dim).view(self.count, mixer.n_heads, mixer.head_dim)

    def _raw(self, mixer: AttentionSpec, weights: AttentionWeights, qkv: Sums) -> HeadInput:
        table, norm = self._parts.buffers.rope(mixer), mixer.qk_norm
        return HeadInput(
            qkv=qkv.values,
            cosines=table.cosines,
            sines=table.sines,
            bias=weights.qkv.bias,
            weight_scale=qkv.weight_scale,
            row_scale=qkv.row_scale,
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            epsilon=norm.eps if norm else 1e-6,
            norm_offset=norm.weight_offset if norm else 0.0,
        )


class DecodeRows(_Attention):
    """One token of each of `count` slots: the last that it sampled, at the slot's position."""

    def __init__(self, parts: Parts, count: int, *, long: bool = False) -> None:
        """long: for steps with a long sequence (reach.py)."""
        super().__init__(parts, count)
        self._long = long
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
            if not self._in_one_launch
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

    def attend(self, layer: int, mixer: AttentionSpec, weights: AttentionWeights, qkv: Sums) -> list[Launch]:
        heads = self._raw(mixer, weights, qkv)
        return self._step(layer, mixer, heads) if self._in_one_launch else self._split(layer, mixer, heads)

    @property
    def _in_one_launch(self) -> bool:
        return serves(self._parts.limits, self._parts.buffers.plan.sizes.kv)

    def _step(self, layer: int, mixer: AttentionSpec, heads: HeadInput) -> list[Launch]:
        parts, buffers = self._parts, self._parts.buffers
        pages, slots = buffers.kv(layer), buffers.slots
        step = attention_step(
            parts.library,
            parts.limits,
            heads=heads,
            block_table=buffers.block_table,
            out=self._heads(self._activations.attended, mixer),
            scale=mixer.scale,
            window=mixer.window,
            long=self._long,
            row_slot=self._row_slot,
            slot_position=slots.position,
            slot_active=slots.active,
            k_pages=pages.k,
            v_pages=pages.v,
            k_scales=pages.k_scale,
            v_scales=pages.v_scale,
        )
        return [step]

    def _split(self, layer: int, mixer: AttentionSpec, heads: HeadInput) -> list[Launch]:
        parts, buffers = self._parts, self._parts.buffers
        pages, slots = buffers.kv(layer), buffers.slots
        query = self._heads(self._activations.query, mixer)
        rope = rope_and_write(
            parts.library,
            heads=heads,
            block_table=buffers.block_table,
            q_out=query,
            row_slot=self._row_slot,
            slot_position=slots.position,
            slot_active=slots.active,
            k_pages=pages.k,
            v_pages=pages.v,
        )
        attention = attention_decode(
            parts.library,
            parts.limits,
            query=query,
            k_pages=pages.k,
            v_pages=pages.v,
            block_table=buffers.block_table,
            plan=buffers.decode_plan(buffers.plan.plan_key(mixer)),
            workspace=buffers.decode_workspace(mixer),
            out=self._heads(self._activations.attended, mixer),
            splits=buffers.plan.splits(mixer),
            scale=mixer.scale,
        )
        return [rope, *attention]


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

    def attend(self, layer: int, mixer: AttentionSpec, weights: AttentionWeights, qkv: Sums) -> list[Launch]:
        parts, buffers = self._parts, self._parts.buffers
        pages, tiles_of = buffers.kv(layer), tile_class(parts.limits, mixer)
        query = self._heads(self._activations.query, mixer)
        index = buffers.plan.tile_classes.index(tiles_of)
        most = most_tiles(self.count, buffers.plan.sizes.slots, tiles_of.group, tiles_of.variant)
        rope = rope_and_write(
            parts.library,
            heads=self._raw(mixer, weights, qkv),
            row_slot=self._row_slot,
            row_position=self._row_position,
            block_table=buffers.block_table,
            q_out=query,
            k_pages=pages.k,
            v_pages=pages.v,
            k_scales=pages.k_scale,
            v_scales=pages.v_scale,
        )
        attention = attention_prefill(
            parts.library,
            parts.limits,
            query=query,
            block_table=buffers.block_table,
            tiles=parts.staging.tensor(f"tiles.{index}").rows(0, most),
            n_tiles=parts.staging.tensor(f"n_tiles.{index}"),
            out=self._heads(self._activations.attended, mixer),
            scale=mixer.scale,
            window=mixer.window,
            k_pages=pages.k,
            v_pages=pages.v,
            k_scales=pages.k_scale,
            v_scales=pages.v_scale,
        )
        return [rope, attention]
