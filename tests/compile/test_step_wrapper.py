"""What one-launch decode attention promises without a GPU: variants that fit, clusters, errors by name."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.attention_step import (
    MAX_CLUSTER,
    attention_step,
    pick_cluster,
    pick_variant,
    reach,
    serves,
)
from kernels.device import DeviceLimits
from kernels.rope import HeadInput, rope_and_write
from kernels.tensor import DType, Tensor

H200 = DeviceLimits((9, 0), 132, 232448, 62914560)
RTX_4090 = DeviceLimits((8, 9), 128, 101376, 75497472)
A100 = DeviceLimits((8, 0), 108, 166912, 41943040)
NO_LIBRARY: Any = None
ROWS, HEADS, KV_HEADS, DIM = 3, 4, 2, 128


def tensor(*shape: int, dtype: DType = DType.BF16) -> Tensor:
    return Tensor(4096, shape, dtype)


def arguments(kv: DType = DType.BF16, **changes: Any) -> dict[str, Any]:
    table = tensor(512, DIM // 2, dtype=DType.F32)
    pages = tensor(9, KV_HEADS, 64, DIM, dtype=kv)
    chosen = {
        "heads": HeadInput(tensor(ROWS, (HEADS + 2 * KV_HEADS) * DIM), table, table),
        "row_slot": tensor(ROWS, dtype=DType.I32),
        "slot_position": tensor(5, dtype=DType.I32),
        "slot_active": tensor(5, dtype=DType.I32),
        "block_table": tensor(5, 8, dtype=DType.I32),
        "k_pages": pages,
        "v_pages": pages,
        "out": tensor(ROWS, HEADS, DIM),
        "scale": 0.1,
    }
    return chosen | changes


@pytest.mark.parametrize("limits", [H200, RTX_4090], ids=["h200", "rtx4090"])
@pytest.mark.parametrize("kv", [DType.BF16, DType.E4M3])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 7, 8, 16])
def test_every_head_size_has_a_variant_that_fits(
    limits: DeviceLimits, kv: DType, head_dim: int, group: int
) -> None:
    variant = pick_variant(limits, kv, head_dim, group)
    assert (variant.kv, variant.head_dim) == (kv, head_dim)
    assert variant.holds(group)
    assert variant.shared_bytes(group) < limits.shared_bytes_per_block


def test_what_no_variant_covers_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim 96"):
        pick_variant(H200, DType.BF16, 96, 4)
    with pytest.raises(ValueError, match="17 query heads per kv head"):
        pick_variant(H200, DType.BF16, 128, 17)
    with pytest.raises(ValueError, match=r"compute capability 8\.9"):
        pick_variant(A100, DType.E4M3, 128, 2)


def test_clusters_fill_the_device_and_no_more() -> None:
    assert [pick_cluster(H200, rows, 8) for rows in (1, 2, 4, 8, 16, 64)] == [8, 8, 4, 2, 1, 1]
    assert pick_cluster(H200, 64, 8, long=True) == MAX_CLUSTER
    assert pick_cluster(RTX_4090, 1, 8, long=True) == 1


def test_sequences_are_long_where_more_blocks_could_share_them() -> None:
    assert [reach(H200, rows, 8) for rows in (1, 2)] == [None, None]
    found = [reach(H200, rows, 8) for rows in (4, 8, 64)]
    assert [of and of.tokens for of in found] == [16384, 8192, 4096]
    assert [of and round(of.share, 2) for of in found] == [0.36, 0.18, 0.09]
    assert reach(RTX_4090, 64, 8) is None


def test_who_goes_this_way() -> None:
    assert serves(H200, DType.BF16)
    assert not serves(A100, DType.BF16)
    assert not serves(RTX_4090, DType.BF16)
    assert serves(RTX_4090, DType.E4M3)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="k_scales belong to e4m3 pages"):
        attention_step(NO_LIBRARY, H200, **arguments(DType.E4M3))
    scales = tensor(9, KV_HEADS, dtype=DType.F32)
    with pytest.raises(ValueError, match="k_scales belong to e4m3 pages"):
        attention_step(NO_LIBRARY, H200, **arguments(k_scales=scales, v_scales=scales))
    with pytest.raises(ValueError, match=r"v_scales must be f32 \[9, 2\]"):
        attention_step(
            NO_LIBRARY,
            H200,
            **arguments(DType.E4M3, k_scales=scales, v_scales=tensor(8, KV_HEADS, dtype=DType.F32)),
        )
    with pytest.raises(ValueError, match=r"row_slot must be i32 \[3\]"):
        attention_step(NO_LIBRARY, H200, **arguments(row_slot=tensor(4, dtype=DType.I32)))
    raw = arguments()["heads"]
    alone = HeadInput(raw.qkv, raw.cosines, raw.sines, row_scale=tensor(ROWS, dtype=DType.F32))
    with pytest.raises(ValueError, match="weight_scale and row_scale come together"):
        attention_step(NO_LIBRARY, H200, **arguments(heads=alone))


def test_e4m3_pages_are_written_by_prefill_alone() -> None:
    chosen = arguments(DType.E4M3)
    scales = tensor(9, KV_HEADS, dtype=DType.F32)
    del chosen["out"], chosen["scale"]
    with pytest.raises(ValueError, match="e4m3 pages need row_position"):
        rope_and_write(NO_LIBRARY, **chosen, q_out=tensor(ROWS, HEADS, DIM), k_scales=scales, v_scales=scales)
