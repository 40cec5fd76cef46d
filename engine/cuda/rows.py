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
from kernels.embedding import embed
from kernels.launch import Launch
from kernels.rope import rope_and_write
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

    def _rope(
        self, layer: int, mixer: AttentionSpec, weights: AttentionWeights, qkv: Sums, **places: Tensor
    ) -> Launch:
        buffers = self._parts.buffers
        pages, table, norm = buffers.kv(layer), buffers.rope(mixer), mixer.qk_norm
        return rope_and_write(
            self._parts.library,
            qkv=qkv.values,
            weight_scale=qkv.weight_scale,
            row_scale=qkv.row_scale,
            cosines=table.cosines,
            sines=table.sines,
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

    def attend(self, layer: int, mixer: AttentionSpec, weights: AttentionWeights, qkv: Sums) -> list[Launch]:
        parts, buffers = self._parts, self._parts.buffers
        slots, pages = buffers.slots, buffers.kv(layer)
        places = {
            "row_slot": self._row_slot,
            "slot_position": slots.position,
            "slot_active": slots.active,
        }
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
        return [self._rope(layer, mixer, weights, qkv, **places), *attention]


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
        places = {"row_slot": self._row_slot, "row_position": self._row_position}
        rope = self._rope(layer, mixer, weights, qkv, **places)
        return [rope, attention]
