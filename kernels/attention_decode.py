"""Decode attention: one query row per sequence over its KV pages (attention_decode.cu).

`plan_decode` once per step and window lists the work of the live contexts; `attention_decode` per layer
strides over that list with a fixed grid and merges what was split, so all fit in a graph. For devices without
clusters; the others decode by attention_step.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.compiler import CompileUnit
from kernels.device import DeviceLimits
from kernels.launch import Dim3, KernelLibrary, Launch, f32, i32
from kernels.tensor import DType, Tensor, expect

SOURCE = "attention_decode.cu"
PAGE_SIZE = 64
MAX_GROUP = 16
"""Most query heads per kv head."""
MAX_ROWS = 1024
_SPLIT_INTS = 8
_MERGE_PAD = 8


@dataclass(frozen=True, slots=True)
class DecodeVariant:
    """Tile and pipeline of one head size."""

    head_dim: int
    keys: int
    """Keys per stage and warp."""
    warps: int
    stages: int
    when: str

    @property
    def expression(self) -> str:
        return f"attention_decode<{self.head_dim}, {self.keys}, {self.warps}, {self.stages}>"

    def shared_bytes(self, group: int) -> int:
        """Dynamic shared memory: the warps' stages, two tiles of queries, the rows of the merge."""
        stages = self.warps * self.stages * 2 * self.keys * self.head_dim * 2
        query_rows = 8 if group <= 8 else MAX_GROUP
        return (
            stages
            + 2 * query_rows * self.head_dim * 2
            + self.warps * group * (self.head_dim + _MERGE_PAD) * 4
        )


VARIANTS = (
    DecodeVariant(64, 32, 4, 3, "two blocks a multiprocessor"),
    DecodeVariant(64, 32, 4, 2, "less shared memory"),
    DecodeVariant(128, 16, 4, 3, "two blocks a multiprocessor, up to 4 heads per kv head; one with more"),
    DecodeVariant(128, 16, 4, 2, "less shared memory"),
    DecodeVariant(128, 16, 2, 2, "less shared memory, 16 heads per kv head"),
    DecodeVariant(256, 16, 4, 2, "up to 160 KB of shared memory"),
    DecodeVariant(256, 16, 2, 2, "less shared memory"),
)
"""Variants that differ in stages alone give the same bits."""

UNITS = (
    CompileUnit(SOURCE, ("plan_decode", "merge_splits")),
    *(CompileUnit(SOURCE, (v.expression,)) for v in VARIANTS),
)


def pick_variant(limits: DeviceLimits, head_dim: int, group: int) -> DecodeVariant:
    """The first variant of this head size that fits. Raises ValueError if there is none."""
    if not 1 <= group <= MAX_GROUP:
        raise ValueError(f"{SOURCE}: {group} query heads per kv head; at most {MAX_GROUP} are supported")
    for variant in VARIANTS:
        fits = variant.shared_bytes(group) + 2048 <= limits.shared_bytes_per_block
        if variant.head_dim == head_dim and fits:
            return variant
    raise ValueError(
        f"{SOURCE}: no variant for head_dim {head_dim} in {limits.shared_bytes_per_block} B of shared memory"
    )


def max_splits(limits: DeviceLimits, n_kv_heads: int) -> int:
    """Most splits of one sequence: enough that one alone fills the device twice. Independent of the batch."""
    return max(8, min(64, 2 * limits.multiprocessors // n_kv_heads))


def min_split_pages(group: int) -> int:
    """Fewest pages of a split, by query heads per kv head: larger groups write larger partial results.

    On an H200 with groups of 2, one sequence of 384 tokens takes 5.0 µs with 2 pages, 6.3 with 4; 64 of them
    31.6 and 30.4; with groups of 8, 32 sequences of 4,096 tokens take 187 and 153.
    """
    return 2 if group <= 4 else 4


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What the workspace depends on."""

    rows: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    splits: int
    """max_splits()."""

    def workspace(self) -> dict[str, tuple[tuple[int, ...], DType]]:
        """Shapes and types of the buffers, by field of DecodeWorkspace."""
        parts = self.rows * self.splits
        return {
            "partial_out": ((parts, self.n_heads, self.head_dim), DType.F32),
            "partial_totals": ((parts, self.n_heads, 2), DType.F32),
        }

    def plan(self) -> dict[str, tuple[tuple[int, ...], DType]]:
        """Shapes and types of the buffers, by field of DecodePlan."""
        return {
            "splits": ((self.rows * self.splits, _SPLIT_INTS), DType.I32),
            "row_splits": ((self.rows, 2), DType.I32),
            "n_splits": ((1,), DType.I32),
        }


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The work of one step, on the device: one for each window among the layers."""

    splits: Tensor
    row_splits: Tensor
    n_splits: Tensor


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Device buffers shared by all layers of a stream."""

    partial_out: Tensor
    partial_totals: Tensor


def plan_decode(
    library: KernelLibrary,
    *,
    row_slot: Tensor,
    slot_position: Tensor,
    slot_active: Tensor,
    plan: DecodePlan,
    splits: int,
    min_pages: int,
    window: int | None = None,
) -> Launch:
    """Lists the splits of all rows; a row attends positions 0 … slot_position of its slot.

    row_slot int32 [rows ≤ 1024], −1 for padding; slot_position, slot_active int32 [slots]; plan as in
    DecodeShape.plan. splits: most of one row, max_splits(); min_pages: fewest pages of one but a row's last,
    min_split_pages(). Raises ValueError for shapes that do not fit.
    """
    (rows,) = row_slot.shape
    expect(SOURCE, "row_slot", row_slot, DType.I32, (rows,))
    expect(SOURCE, "slot_position", slot_position, DType.I32, (None,))
    expect(SOURCE, "slot_active", slot_active, DType.I32, slot_position.shape)
    _expect_plan(plan, rows, splits)
    threads = -(-rows // 32) * 32
    arguments = (
        row_slot, slot_position, slot_active, plan.splits, plan.row_splits, plan.n_splits, i32(rows),
        i32(window or 0), i32(min_pages), i32(splits),
    )  # fmt: skip
    return Launch(library.kernel(SOURCE, "plan_decode"), Dim3(1), Dim3(threads), arguments)


def _expect_plan(plan: DecodePlan, rows: int, splits: int) -> None:
    expect(SOURCE, "plan.splits", plan.splits, DType.I32, (None, _SPLIT_INTS))
    expect(SOURCE, "plan.row_splits", plan.row_splits, DType.I32, (None, 2))
    expect(SOURCE, "plan.n_splits", plan.n_splits, DType.I32, (1,))
    if not 0 < rows <= MAX_ROWS or rows > plan.row_splits.shape[0] or rows * splits > plan.splits.shape[0]:
        raise ValueError(f"{SOURCE}: a plan of {plan.splits.shape[0]} splits for {rows} rows of {splits}")


def attention_decode(
    library: KernelLibrary,
    limits: DeviceLimits,
    *,
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    plan: DecodePlan,
    workspace: DecodeWorkspace,
    out: Tensor,
    splits: int,
    scale: float,
    variant: DecodeVariant | None = None,
) -> list[Launch]:
    """The launches of softmax(scale · q·k) · v; rows without an active slot become zeros.

    query, out       bf16 [rows, n_heads, head_dim], head_dim 64, 128 or 256, n_heads / n_kv_heads ≤ 16
    k_pages, v_pages bf16 [pages, n_kv_heads, 64, head_dim]; the row's own key is in them already
    block_table      int32 [slots, width]
    plan             of this step and the layer's window
    workspace        as in DecodeShape.workspace
    splits           as given to plan_decode

    With dependent launch, the plan, the block table and all keys but each row's newest are read while the
    launch right before still runs. So that one may write queries and newest keys (rope_and_write), but it
    must not be plan_decode or change_slots.

    Raises ValueError for shapes that do not fit.
    """
    rows, n_heads, head_dim = query.shape
    n_kv_heads = k_pages.shape[1]
    expect(SOURCE, "query", query, DType.BF16, (rows, n_heads, head_dim))
    expect(SOURCE, "out", out, DType.BF16, query.shape)
    expect(SOURCE, "k_pages", k_pages, DType.BF16, (None, n_kv_heads, PAGE_SIZE, head_dim))
    expect(SOURCE, "v_pages", v_pages, DType.BF16, k_pages.shape)
    expect(SOURCE, "block_table", block_table, DType.I32, (None, None))
    if n_heads % n_kv_heads:
        raise ValueError(f"{SOURCE}: {n_heads} heads cannot share {n_kv_heads} kv heads evenly")
    shape = DecodeShape(rows, n_heads, n_kv_heads, head_dim, splits)
    for name, (wanted, dtype) in shape.workspace().items():
        buffer: Tensor = getattr(workspace, name)
        if buffer.dtype is not dtype or buffer.shape[0] < wanted[0] or buffer.shape[1:] != wanted[1:]:
            raise ValueError(f"{SOURCE}: workspace.{name} is {list(buffer.shape)}, needs {list(wanted)}")
    _expect_plan(plan, rows, splits)
    group = n_heads // n_kv_heads
    variant = variant or pick_variant(limits, head_dim, group)
    shared_bytes = variant.shared_bytes(group)
    kernel = library.kernel(SOURCE, variant.expression, dynamic_shared_bytes=shared_bytes)
    resident = library.blocks_per_multiprocessor(kernel, variant.warps * 32, shared_bytes)
    blocks = min(limits.multiprocessors * max(1, resident), rows * n_kv_heads * splits)
    arguments = (
        query, k_pages, v_pages, block_table, plan.splits, plan.n_splits, workspace.partial_out,
        workspace.partial_totals, out, i32(n_heads), i32(n_kv_heads), i32(block_table.shape[1]), f32(scale),
    )  # fmt: skip
    merge = library.kernel(SOURCE, "merge_splits")
    merge_arguments = (
        plan.row_splits, workspace.partial_out, workspace.partial_totals, out, i32(n_heads), i32(head_dim),
    )  # fmt: skip
    merge_grid = Dim3(-(-n_heads * head_dim // 128), rows)
    return [
        Launch(kernel, Dim3(blocks), Dim3(variant.warps * 32), arguments, shared_bytes=shared_bytes),
        Launch(merge, merge_grid, Dim3(128), merge_arguments),
    ]
