"""Decode attention over pages against float64, at awkward contexts, groups and windows."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_support import Gpu, PagedCase, assert_close, attention_reference, random_bf16

from kernels import attention_decode as decode
from kernels.tensor import DType

pytestmark = pytest.mark.gpu
CONTEXTS = [1, 63, 64, 65, 200, 4097, 128, 1000]
TOLERANCE = {"rtol": 2**-7, "atol": 4e-3}
"""Weights are rounded to bf16 before they meet the values: 2^−9 of the result, and its own rounding."""


def run_decode(
    gpu: Gpu,
    case: PagedCase,
    query: np.ndarray,
    row_slot: np.ndarray,
    active: np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    variant: decode.DecodeVariant | None = None,
    splits: int | None = None,
    repeat: int = 1,
) -> np.ndarray:
    rows, n_heads, head_dim = query.shape
    n_kv_heads = case.k_pages.shape[1]
    splits = splits or decode.max_splits(gpu.limits, n_kv_heads)
    shape = decode.DecodeShape(rows, n_heads, n_kv_heads, head_dim, splits)
    workspace = gpu.buffers(decode.DecodeWorkspace, shape.workspace())
    work = gpu.buffers(decode.DecodePlan, shape.plan())
    position = np.array(case.contexts, np.int32) - 1
    out = gpu.empty(query.shape, DType.BF16)
    plan = decode.plan_decode(
        gpu.library,
        row_slot=gpu.upload(row_slot),
        slot_position=gpu.upload(position),
        slot_active=gpu.upload(active),
        plan=work,
        splits=splits,
        window=window,
        min_pages=decode.min_split_pages(n_heads // n_kv_heads),
    )
    launches = decode.attention_decode(
        gpu.library,
        gpu.limits,
        query=gpu.upload(query),
        k_pages=gpu.upload(case.k_pages),
        v_pages=gpu.upload(case.v_pages),
        block_table=gpu.upload(case.block_table),
        plan=work,
        workspace=workspace,
        out=out,
        splits=splits,
        scale=scale,
        variant=variant,
    )
    for _ in range(repeat):
        gpu.run(plan)
        gpu.run(*launches)
    return gpu.download(out)


def check_decode(
    case: PagedCase,
    query: np.ndarray,
    got: np.ndarray,
    row_slot: np.ndarray,
    active: np.ndarray,
    *,
    scale: float,
    window: int | None = None,
) -> None:
    for row, slot in enumerate(row_slot):
        if slot < 0 or not active[slot]:
            assert (got[row].astype(np.float32) == 0).all(), f"row {row} without an active slot is not zeros"
            continue
        position = case.contexts[slot] - 1
        want = attention_reference(query[row], case.keys[slot], case.values[slot], position, scale, window)
        assert_close(f"row {row}, context {position + 1}", got[row], want, **TOLERANCE)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 16])
@pytest.mark.parametrize("window", [None, 1, 100, 1024])
def test_decode(gpu: Gpu, rng: np.random.Generator, head_dim: int, group: int, window: int | None) -> None:
    case = PagedCase(rng, CONTEXTS, 2, head_dim)
    row_slot = np.array([5, 0, -1, 1, 2, 3, 4, 6, 7], np.int32)
    active = np.ones(len(CONTEXTS), np.int32)
    active[6] = 0
    query = random_bf16(rng, len(row_slot), 2 * group, head_dim)
    scale = head_dim**-0.5
    got = run_decode(gpu, case, query, row_slot, active, scale=scale, window=window, repeat=2)
    check_decode(case, query, got, row_slot, active, scale=scale, window=window)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_decode_scale(gpu: Gpu, rng: np.random.Generator, head_dim: int) -> None:
    case = PagedCase(rng, [500, 77], 1, head_dim)
    row_slot, active = np.array([1, 0], np.int32), np.ones(2, np.int32)
    query = random_bf16(rng, 2, 4, head_dim)
    got = run_decode(gpu, case, query, row_slot, active, scale=1.0)
    check_decode(case, query, got, row_slot, active, scale=1.0)


@pytest.mark.parametrize(
    "variant", decode.VARIANTS, ids=lambda v: f"{v.head_dim}-{v.keys}-{v.warps}-{v.stages}"
)
def test_decode_variants(gpu: Gpu, rng: np.random.Generator, variant: decode.DecodeVariant) -> None:
    """Also those for smaller devices, which this one would not pick."""
    case = PagedCase(rng, [1, 64, 700, 3000], 2, variant.head_dim)
    row_slot, active = np.arange(4, dtype=np.int32), np.ones(4, np.int32)
    query = random_bf16(rng, 4, 8, variant.head_dim)
    scale = variant.head_dim**-0.5
    got = run_decode(gpu, case, query, row_slot, active, scale=scale, variant=variant)
    check_decode(case, query, got, row_slot, active, scale=scale)


def test_decode_does_not_depend_on_the_batch(gpu: Gpu, rng: np.random.Generator) -> None:
    contexts = [int(c) for c in rng.integers(1, 3000, 64)]
    case = PagedCase(rng, contexts, 2, 128)
    active = np.ones(64, np.int32)
    row_slot = rng.permutation(64).astype(np.int32)
    query = random_bf16(rng, 64, 4, 128)
    together = run_decode(gpu, case, query, row_slot, active, scale=0.1)
    check_decode(case, query, together, row_slot, active, scale=0.1)
    for row in (0, 13, 63):
        alone = run_decode(gpu, case, query[row : row + 1], row_slot[row : row + 1], active, scale=0.1)
        assert (alone[0].view(np.uint16) == together[row].view(np.uint16)).all()


@pytest.mark.parametrize("rows", [1, 33, 200, 1000])
def test_decode_many_rows(gpu: Gpu, rng: np.random.Generator, rows: int) -> None:
    contexts = [int(c) for c in rng.integers(1, 200, rows)]
    case = PagedCase(rng, contexts, 1, 64)
    row_slot, active = rng.permutation(rows).astype(np.int32), (rng.random(rows) < 0.8).astype(np.int32)
    query = random_bf16(rng, rows, 3, 64)
    got = run_decode(gpu, case, query, row_slot, active, scale=0.125)
    check_decode(case, query, got, row_slot, active, scale=0.125)
