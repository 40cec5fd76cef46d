"""Decode attention of a layer in one launch, from the raw q|k|v rows to the result (attention_step.cu).

Needs no list of splits and no workspace: a cluster of blocks shares a row's kv head. The pages' type decides
whether they are bf16 or e4m3 with a scale per page and head.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.compiler import CompileUnit
from kernels.device import DeviceLimits
from kernels.launch import Dim3, KernelLibrary, Launch, f32, i32
from kernels.rope import PAGE_SIZE, HeadInput, expect_pages
from kernels.tensor import DType, Tensor, expect

SOURCE = "attention_step.cu"
MAX_GROUP = 16
"""Most query heads per kv head."""
MAX_CLUSTER = 8
"""Blocks that every device with clusters can run together."""
KEYS_PER_BLOCK = 4096
"""A sequence is not long while its blocks get no more keys than this each. One block reads some 50 GB/s on an
H200: 4,096 keys of 128 in bf16 take it 42 µs, as long as all of 64 rows at context 600."""
_FIRST_WITH_CLUSTERS = (9, 0)
_FIRST_WITH_E4M3 = (8, 9)
_C_TYPES = {DType.BF16: "bf16", DType.E4M3: "e4m3"}
_MERGE_PAD = 8
_RESERVED_BYTES = 6144
"""Static shared memory, and what the system keeps of each block."""


@dataclass(frozen=True, slots=True)
class StepVariant:
    """Tile and pipeline of one head size and page type."""

    kv: DType
    head_dim: int
    keys: int
    """Keys per stage and warp."""
    warps: int
    stages: int
    resident: int
    """Blocks per multiprocessor that registers are kept free for."""

    @property
    def expression(self) -> str:
        shape = f"{self.head_dim}, {self.keys}, {self.warps}, {self.stages}, {self.resident}"
        return f"attention_step<{_C_TYPES[self.kv]}, {shape}>"

    def ring_bytes(self) -> int:
        """Of one warp."""
        return self.stages * 2 * self.keys * self.head_dim * self.kv.bytes

    def shared_bytes(self, group: int) -> int:
        """Dynamic shared memory: the warps' rings, the queries, what a cluster's blocks hand over."""
        queries = (8 if group <= 8 else MAX_GROUP) * self.head_dim * 2
        return self.warps * self.ring_bytes() + queries + group * self.head_dim * 4

    def holds(self, group: int) -> bool:
        """Whether a warp's ring has room for its result."""
        return group * (self.head_dim + _MERGE_PAD) * 4 <= self.ring_bytes()


VARIANTS = (
    StepVariant(DType.BF16, 64, 32, 2, 3, 4),
    StepVariant(DType.BF16, 128, 16, 4, 3, 2),
    StepVariant(DType.BF16, 128, 16, 4, 2, 2),
    StepVariant(DType.BF16, 256, 16, 4, 2, 1),
    StepVariant(DType.BF16, 256, 16, 2, 2, 1),
    StepVariant(DType.E4M3, 64, 32, 2, 4, 4),
    StepVariant(DType.E4M3, 128, 32, 2, 3, 4),
    StepVariant(DType.E4M3, 256, 16, 4, 3, 1),
    StepVariant(DType.E4M3, 256, 16, 2, 3, 1),
)
"""The first that fits is taken. The warps of a block take one page at a time; with two pages, short sequences
leave half of the warps idle. On an H200 with heads of 128, in µs: 64 rows at context 384 in bf16 26.4, with
two stages 29.2, with eight warps 30.5; in e4m3 14.5, with four warps 18.5, with tiles of 16 keys 15.9; at
context 4,096 128, 128 and 132."""

UNITS = tuple(CompileUnit(SOURCE, (v.expression,)) for v in VARIANTS)


def pick_variant(limits: DeviceLimits, kv: DType, head_dim: int, group: int) -> StepVariant:
    """The first variant of this head size and page type that fits. Raises ValueError if there is none."""
    if not 1 <= group <= MAX_GROUP:
        raise ValueError(f"{SOURCE}: {group} query heads per kv head; at most {MAX_GROUP} are supported")
    if kv is DType.E4M3 and limits.compute_capability < _FIRST_WITH_E4M3:
        raise ValueError(f"{SOURCE}: e4m3 pages need compute capability 8.9 or newer")
    for variant in VARIANTS:
        fits = variant.shared_bytes(group) + _RESERVED_BYTES <= limits.shared_bytes_per_block
        if (variant.kv, variant.head_dim) == (kv, head_dim) and fits and variant.holds(group):
            return variant
    raise ValueError(
        f"{SOURCE}: no variant for {kv.value} pages of head_dim {head_dim}, {group} query heads per kv head, "
        f"{limits.shared_bytes_per_block} B of shared memory"
    )


def pick_cluster(limits: DeviceLimits, rows: int, n_kv_heads: int, *, long: bool = False) -> int:
    """Blocks that share a row's kv head: as many as make one block a multiprocessor; for long sequences all.

    Between the products around it, a layer of 8 rows at context 256 (8 kv heads) takes 9.2 µs as three
    launches on an H200, 5.4 here with one or two blocks, 8.5 with four: two blocks a multiprocessor.
    """
    if limits.compute_capability < _FIRST_WITH_CLUSTERS:
        return 1
    cluster = MAX_CLUSTER
    while not long and cluster > 1 and rows * n_kv_heads * cluster > limits.multiprocessors:
        cluster //= 2
    return cluster


@dataclass(frozen=True, slots=True)
class Reach:
    """A sequence is long if it has more tokens than this, and more than this share of all rows' tokens."""

    tokens: int
    share: float


def reach(limits: DeviceLimits, rows: int, n_kv_heads: int) -> Reach | None:
    """Which sequences are long among so many rows; None if none is: they have as many blocks as there may be.

    Such a one is still being read when all others are done. Some two blocks for three multiprocessors read as
    fast as a whole H200.
    """
    cluster = pick_cluster(limits, rows, n_kv_heads)
    if limits.compute_capability < _FIRST_WITH_CLUSTERS or cluster == MAX_CLUSTER:
        return None
    return Reach(KEYS_PER_BLOCK * cluster, 1.5 * n_kv_heads * cluster / limits.multiprocessors)


def serves(limits: DeviceLimits, kv: DType) -> bool:
    """Whether decode goes this way. Without clusters, rope_and_write and attention_decode share out long
    sequences over bf16 pages better.

    On an H200 the three launches take, in µs, for 16 query heads: 32 rows at context 384 20.5, 64 rows 33.8,
    64 rows at 2,048 141, one at 8,192 15.1; this one 13.6, 26.4, 123 and 12.9.
    """
    return kv is DType.E4M3 or limits.compute_capability >= _FIRST_WITH_CLUSTERS


def attention_step(
    library: KernelLibrary,
    limits: DeviceLimits,
    *,
    heads: HeadInput,
    row_slot: Tensor,
    slot_position: Tensor,
    slot_active: Tensor,
    block_table: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    out: Tensor,
    scale: float,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    window: int | None = None,
    long: bool = False,
    variant: StepVariant | None = None,
    cluster: int | None = None,
) -> Launch:
    """Writes each row's key and value into its page, and softmax(scale · q·k) · v over its pages into out.

    heads            the raw rows and what makes q, k and v of them
    row_slot         int32 [rows]; −1 for padding
    slot_position, slot_active  int32 [slots]; the row's token stands at its slot's position. Rows without an
                     active slot become zeros and write no page
    block_table      int32 [slots, width]: page of positions 64·i … 64·i + 63
    k_pages, v_pages bf16 or e4m3 [pages, n_kv_heads, 64, head_dim], head_dim 64, 128 or 256
    k_scales, v_scales  float32 [pages, n_kv_heads], with e4m3; updated as rope_and_write does
    out              bf16 [rows, n_heads, head_dim], n_heads / n_kv_heads ≤ 16
    window           keys a row sees, its own included; None: all before it
    long             for rows with a long sequence among them (see Reach): others it merely costs time
    cluster          None: pick_cluster's

    With dependent launch, all but heads.qkv and heads.row_scale is read while the launch right before still
    runs: that must not be one that changes slots, the block table or pages.

    Raises ValueError for shapes that do not fit and for e4m3 pages below compute capability 8.9.
    """
    rows, n_heads, head_dim = out.shape
    n_kv_heads = k_pages.shape[1]
    if n_heads % n_kv_heads:
        raise ValueError(f"{SOURCE}: {n_heads} heads cannot share {n_kv_heads} kv heads evenly")
    expect(SOURCE, "out", out, DType.BF16, (rows, n_heads, head_dim))
    heads.expect_shapes(SOURCE, rows, n_heads, n_kv_heads, head_dim)
    expect_pages(SOURCE, k_pages, v_pages, k_scales, v_scales, head_dim)
    expect(SOURCE, "row_slot", row_slot, DType.I32, (rows,))
    expect(SOURCE, "block_table", block_table, DType.I32, (None, None))
    expect(SOURCE, "slot_position", slot_position, DType.I32, (block_table.shape[0],))
    expect(SOURCE, "slot_active", slot_active, DType.I32, (block_table.shape[0],))
    group = n_heads // n_kv_heads
    variant = variant or pick_variant(limits, k_pages.dtype, head_dim, group)
    cluster = cluster or pick_cluster(limits, rows, n_kv_heads, long=long)
    if variant.kv is not k_pages.dtype or not variant.holds(group) or PAGE_SIZE % variant.keys:
        raise ValueError(f"{SOURCE}: {variant} does not serve {group} heads over {k_pages.dtype.value} pages")
    shared_bytes = variant.shared_bytes(group)
    kernel = library.kernel(SOURCE, variant.expression, dynamic_shared_bytes=shared_bytes)
    arguments = (
        *heads.tensors(), row_slot, slot_position, slot_active, block_table, k_pages, v_pages,
        k_scales, v_scales, out, i32(n_heads), i32(n_kv_heads),
        i32(heads.cosines.shape[1]), i32(block_table.shape[1]), i32(window or 0), f32(heads.epsilon),
        f32(heads.norm_offset), f32(scale),
    )  # fmt: skip
    grid, block = Dim3(cluster, n_kv_heads, rows), Dim3(variant.warps * 32)
    return Launch(kernel, grid, block, arguments, shared_bytes=shared_bytes, cluster=cluster)
