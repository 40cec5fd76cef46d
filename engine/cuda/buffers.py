"""Every device buffer that a forward pass touches: reserved by shape before loading, handed out as views.

Activations belong to one stream: two streams never share them. Sizes are the maximum over all layers and
buckets. Reads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.config import AttentionSpec, DenseSpec, ModelConfig
from engine.config.rope import RopeSpec
from engine.cuda.device import Stream
from engine.cuda.gemm import WORKSPACE_BYTES
from engine.cuda.memory import Arena, Layout
from engine.interface import PAGE_SIZE, pages_for
from kernels.attention_decode import DecodePlan, DecodeShape, DecodeWorkspace, max_splits, min_split_pages
from kernels.attention_prefill import PrefillVariant, pick_variant
from kernels.attention_step import serves
from kernels.device import DeviceLimits
from kernels.logprobs import parts_shape
from kernels.sampling import SampleScratch, SampleShape
from kernels.slots import SlotBuffers, SlotShape
from kernels.tensor import DType, Tensor

Table = Mapping[str, tuple[tuple[int, ...], DType]]
"""Shapes and types of buffers by name."""
Kind = TypeVar("Kind")

MAX_STOP_IDS = 96
"""Per slot: what a request may name, and a model's own."""
_PROMPT_ROWS = 64
"""Fewest rows of logits, so that a prompt's log-probabilities are not computed a row at a time."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Of the rows of a pass, or of those chosen from it. Of a pass, rows of `residual` and `attended` from
    `rows` on are the slots' carried rows.
    """

    residual: Tensor
    """bf16 [rows (+ slots), hidden]."""
    delta: Tensor
    """bf16 [rows, hidden]: what a product adds to the residual where it has a bias."""
    normed: Tensor
    """bf16 [rows, hidden]."""
    qkv: Tensor
    query: Tensor
    attended: Tensor
    """bf16 [rows (+ slots), the widest layer's heads · head_dim]."""
    gate_up: Tensor
    activated: Tensor


@dataclass(frozen=True, slots=True)
class LogitBuffers:
    """What sampling works on, for at most `rows` rows at once."""

    logits: Tensor
    """float32 [rows, vocab]."""
    logprob_parts: Tensor


@dataclass(frozen=True, slots=True)
class KvPages:
    """One layer's cache: bf16 or e4m3 [pages, n_kv_heads, 64, head_dim] each."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    """float32 [pages, n_kv_heads], powers of two, with e4m3: a key is scale · what is stored."""
    v_scale: Tensor | None


@dataclass(frozen=True, slots=True)
class RopeTable:
    """float32 [positions, rotated / 2] each."""

    cosines: Tensor
    sines: Tensor


class SplitKey(NamedTuple):
    """What a list of decode splits depends on, besides the step."""

    window: int | None
    splits: int
    min_pages: int


@dataclass(frozen=True, slots=True)
class TileClass:
    """Attention layers that share a list of prefill tiles."""

    group: int
    variant: PrefillVariant


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """What everything else follows from."""

    rows: int
    """Most rows of one program, padding included."""
    slots: int
    width: int
    """Most decode rows, padding included."""
    positions: int
    """Of the longest sequence."""
    kv: DType = DType.BF16
    """Of keys and values in their pages: bf16 or e4m3."""
    scratch: int = 0
    """Elements of the largest weight that is made bf16 before it is multiplied."""

    @property
    def logit_rows(self) -> int:
        return max(self.width, min(_PROMPT_ROWS, self.rows))

    @property
    def table_width(self) -> int:
        """Entries of a block table."""
        return pages_for(self.positions)


class BufferPlan:
    """Reserves all buffers of a model, and finds them again in the arena."""

    def __init__(self, config: ModelConfig, limits: DeviceLimits, sizes: BufferSizes) -> None:
        self.config = config
        self.limits = limits
        self.sizes = sizes
        self.slot_shape = SlotShape(sizes.slots, config.vocab_size, max_stop=MAX_STOP_IDS)
        self.mixers = [layer.mixer for layer in config.layers if isinstance(layer.mixer, AttentionSpec)]
        self.ropes = {rope_key(mixer): mixer for mixer in self.mixers}
        self._rope_prefixes = {key: f"rope.{i}." for i, key in enumerate(self.ropes)}
        self.tile_classes = tuple(dict.fromkeys(tile_class(limits, mixer) for mixer in self.mixers))
        split = [] if serves(limits, sizes.kv) else self.mixers
        self._decode_shapes = {_heads(mixer): self._decode_shape(mixer) for mixer in split}
        self._decode_plans = {self.plan_key(mixer): self._decode_shape(mixer) for mixer in split}

    def reserve(self, layout: Layout) -> None:
        """Everything but the KV pages."""
        sizes = self.sizes
        reserve(layout, "activations", "main.", self._activations(sizes.rows, carried=sizes.slots))
        reserve(layout, "activations", "chosen.", self._activations(sizes.logit_rows))
        layout.add("workspaces", "workspace", (WORKSPACE_BYTES,), DType.U8)
        layout.add("workspaces", "scratch", (sizes.scratch,), DType.BF16)
        for heads, decode in self._decode_shapes.items():
            reserve(layout, "activations", f"decode.{heads}.", decode.workspace())
        for key, decode in self._decode_plans.items():
            reserve(layout, "activations", f"decode_plan.{key}.", decode.plan())
        reserve(layout, "logits", "logits.", self._logits())
        reserve(layout, "logits", "sample.", self._sample_shape().scratch())
        reserve(layout, "slot_state", "slots.", self.slot_shape.buffers())
        layout.add("slot_state", "block_table", (sizes.slots, sizes.table_width), DType.I32)
        for mixer in self.ropes.values():
            shape = (sizes.positions, rope_half(mixer))
            reserve(
                layout,
                "rope",
                self.rope_prefix(mixer),
                dict.fromkeys(("cosines", "sines"), (shape, DType.F32)),
            )

    def page_bytes(self) -> int:
        """Of one page over all layers, K and V."""
        return sum(2 * self._page_bytes(mixer) for mixer in self.mixers)

    def _page_bytes(self, mixer: AttentionSpec) -> int:
        """Of one layer's keys, with their scales."""
        scales = mixer.n_kv_heads * DType.F32.bytes if self.sizes.kv is DType.E4M3 else 0
        return mixer.kv_dim * PAGE_SIZE * self.sizes.kv.bytes + scales

    def reserve_pages(self, layout: Layout, pages: int) -> None:
        for index in self.config.attention_layers:
            mixer = self.config.layers[index].mixer
            assert isinstance(mixer, AttentionSpec)
            for name in ("k", "v"):
                shape = (pages, mixer.n_kv_heads, PAGE_SIZE, mixer.head_dim)
                layout.add("kv_pages", f"kv.{index}.{name}", shape, self.sizes.kv)
                if self.sizes.kv is DType.E4M3:
                    layout.add("kv_pages", f"kv.{index}.{name}_scale", shape[:2], DType.F32)

    def plan_key(self, mixer: AttentionSpec) -> SplitKey:
        """Layers with the same key share the list of decode splits."""
        group = mixer.n_heads // mixer.n_kv_heads
        return SplitKey(mixer.window, self.splits(mixer), min_split_pages(group))

    def rope_prefix(self, mixer: AttentionSpec) -> str:
        return self._rope_prefixes[rope_key(mixer)]

    def splits(self, mixer: AttentionSpec) -> int:
        return max_splits(self.limits, mixer.n_kv_heads)

    def _decode_shape(self, mixer: AttentionSpec) -> DecodeShape:
        return DecodeShape(self.sizes.width, *_heads(mixer), self.splits(mixer))

    def _sample_shape(self) -> SampleShape:
        vocab = self.config.vocab_size
        return SampleShape(self.sizes.width, vocab, vocab)

    def _activations(self, rows: int, carried: int = 0) -> Table:
        """carried: rows behind those of a pass; see Activations."""
        hidden = self.config.hidden_size
        dense = [
            layer.feed_forward for layer in self.config.layers if isinstance(layer.feed_forward, DenseSpec)
        ]
        query = max(mixer.q_dim for mixer in self.mixers)
        intermediate = max(spec.intermediate for spec in dense)
        shapes = {
            "residual": (rows + carried, hidden),
            "delta": (rows, hidden),
            "normed": (rows, hidden),
            "qkv": (rows, max(mixer.q_dim + 2 * mixer.kv_dim for mixer in self.mixers)),
            "query": (rows, query),
            "attended": (rows + carried, query),
            "gate_up": (rows, 2 * intermediate),
            "activated": (rows, intermediate),
        }
        return {name: (shape, DType.BF16) for name, shape in shapes.items()}

    def _logits(self) -> Table:
        rows, vocab = self.sizes.logit_rows, self.config.vocab_size
        return {
            "logits": ((rows, vocab), DType.F32),
            "logprob_parts": (parts_shape(rows, vocab), DType.U8),
        }


class Buffers:
    """The reserved buffers in the arena."""

    def __init__(self, plan: BufferPlan, arena: Arena) -> None:
        self.plan = plan
        self.activations = bound(arena, "main.", Activations)
        """Of a pass."""
        self.chosen = bound(arena, "chosen.", Activations)
        """Of at most logit_rows rows chosen from a prefill pass."""
        self.workspace = arena.tensor("workspace")
        """u8, cuBLASLt's."""
        self.scratch = arena.tensor("scratch")
        """bf16 [sizes.scratch]."""
        self.logits = bound(arena, "logits.", LogitBuffers)
        self.sample = bound(arena, "sample.", SampleScratch)
        slots = {name: arena.tensor(f"slots.{name}") for name in plan.slot_shape.buffers()}
        self.slots = SlotBuffers(plan.slot_shape, **slots)
        self.block_table = arena.tensor("block_table")
        self._arena = arena

    def kv(self, layer: int) -> KvPages:
        def find(name: str) -> Tensor | None:
            return self._arena.tensor(name) if name in self._arena else None

        k, v = (self._arena.tensor(f"kv.{layer}.{name}") for name in ("k", "v"))
        return KvPages(k, v, find(f"kv.{layer}.k_scale"), find(f"kv.{layer}.v_scale"))

    def rope(self, mixer: AttentionSpec) -> RopeTable:
        return bound(self._arena, self.plan.rope_prefix(mixer), RopeTable)

    def decode_workspace(self, mixer: AttentionSpec) -> DecodeWorkspace:
        return bound(self._arena, f"decode.{_heads(mixer)}.", DecodeWorkspace)

    def decode_plan(self, key: SplitKey) -> DecodePlan:
        return bound(self._arena, f"decode_plan.{key}.", DecodePlan)

    def carry(self, stream: Stream, row: int, slot: int) -> None:
        """Keeps a row that a pass left behind its last attention, for the slot's next pass."""
        target = self.plan.sizes.rows + slot
        mixer = self.plan.mixers[-1]
        residual = self.activations.residual
        attended = part(self.activations.attended, residual.shape[0], mixer.q_dim)
        for buffer in (residual, attended):
            source = buffer.rows(row, row + 1)
            stream.copy_on_device(buffer.rows(target, target + 1).address, source.address, source.bytes)


def reserve(layout: Layout, part: str, prefix: str, table: Table) -> None:
    for name, (shape, dtype) in table.items():
        layout.add(part, prefix + name, shape, dtype)


def bound(arena: Arena, prefix: str, kind: type[Kind]) -> Kind:
    """A dataclass of tensors, each from the arena under its field's name."""
    return kind(**{f.name: arena.tensor(prefix + f.name) for f in fields(kind)})  # type: ignore[arg-type]


def part(tensor: Tensor, rows: int, width: int) -> Tensor:
    """The first rows · width elements as [rows, width]: a buffer sized for the widest layer, used by another.

    Raises ValueError if there are fewer.
    """
    view = Tensor(tensor.address, (rows, width), tensor.dtype)
    if view.bytes > tensor.bytes:
        raise ValueError(f"{rows} × {width} elements of a buffer of {list(tensor.shape)}")
    return view


def tile_class(limits: DeviceLimits, mixer: AttentionSpec) -> TileClass:
    variant = pick_variant(limits, mixer.head_dim)
    return TileClass(mixer.n_heads // mixer.n_kv_heads, variant)


def rope_key(mixer: AttentionSpec) -> tuple[RopeSpec | None, int]:
    """Layers with the same key share a table."""
    return mixer.rope, mixer.head_dim


def rope_half(mixer: AttentionSpec) -> int:
    """Columns of the table. A layer without rope turns the fewest elements that a kernel can, by nothing."""
    return mixer.head_dim // 32 if mixer.rope is None else mixer.rope.rotary_dim // 2


def rope_values(mixer: AttentionSpec, positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines, float32 [positions, half]: the angle is rounded to float32, the cosine is exact."""
    if mixer.rope is None:
        shape = (positions, rope_half(mixer))
        return np.ones(shape, np.float32), np.zeros(shape, np.float32)
    angles = np.arange(positions, dtype=np.float32)[:, None] * mixer.rope.inverse_frequencies()
    exact = angles.astype(np.float64)
    factor = np.float64(mixer.rope.attention_factor)
    return (np.cos(exact) * factor).astype(np.float32), (np.sin(exact) * factor).astype(np.float32)


def _heads(mixer: AttentionSpec) -> tuple[int, int, int]:
    return mixer.n_heads, mixer.n_kv_heads, mixer.head_dim
