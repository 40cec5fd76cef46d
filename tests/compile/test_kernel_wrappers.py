"""What the kernels' Python side promises without a GPU: layouts, tile lists, and errors before any launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels import activation, attention_decode, attention_prefill, embedding, norm, rope, sampling, slots
from kernels.device import DeviceLimits
from kernels.tensor import DType, Tensor

H200 = DeviceLimits((9, 0), 132, 232448, 62914560)
RTX_3090 = DeviceLimits((8, 6), 82, 101376, 6291456)
NO_LIBRARY: Any = None
"""Shapes are checked before the library is asked for anything."""


def tensor(*shape: int, dtype: DType = DType.BF16, address: int = 4096) -> Tensor:
    return Tensor(address, shape, dtype)


def test_records_have_the_layout_of_the_headers() -> None:
    assert slots.SAMPLING_DTYPE.itemsize == 64
    assert slots.START_DTYPE.itemsize == 96
    assert [slots.SAMPLING_DTYPE.fields[n][1] for n in ("top_p", "temperature", "top_k", "penalised")] == [
        8,
        16,
        36,
        56,
    ]


def test_tensor_rows_and_views() -> None:
    whole = tensor(10, 4, 8)
    assert whole.bytes == 640
    assert whole.rows(2, 5) == tensor(3, 4, 8, address=4096 + 2 * 64)
    assert whole.view(40, 8) == tensor(40, 8)
    with pytest.raises(ValueError, match="rows 5 … 11 of a tensor with 10"):
        whole.rows(5, 11)
    with pytest.raises(ValueError, match="cannot be seen as"):
        whole.view(3, 3)


@pytest.mark.parametrize("limits", [H200, RTX_3090], ids=["h200", "rtx3090"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 7, 8])
def test_every_head_size_has_a_variant_that_fits(limits: DeviceLimits, head_dim: int, group: int) -> None:
    decode = attention_decode.pick_variant(limits, head_dim, group)
    assert decode.head_dim == head_dim
    assert decode.shared_bytes(group) < limits.shared_bytes_per_block
    prefill = attention_prefill.pick_variant(limits, head_dim)
    assert prefill.head_dim == head_dim
    assert prefill.shared_bytes < limits.shared_bytes_per_block


@pytest.mark.parametrize("head_dim", [64, 128])
def test_few_prefill_tiles_are_shared_by_two_parts_of_a_block(head_dim: int) -> None:
    many = attention_prefill.pick_variant(H200, head_dim, 2 * 132 + 1)
    few = attention_prefill.pick_variant(H200, head_dim, 2 * 132)
    assert (many.parts, few.parts) == (1, 2)
    assert many == attention_prefill.pick_variant(H200, head_dim)
    assert many.rows == few.rows, "one list of tiles serves both"
    assert few.shared_bytes + 2048 <= H200.shared_bytes_per_block


def test_prefill_takes_wgmma_where_there_is_one() -> None:
    for head_dim in (64, 128):
        variant = attention_prefill.pick_hopper_variant(H200, head_dim, DType.BF16)
        assert variant is not None
        assert variant.rows == attention_prefill.pick_variant(H200, head_dim).rows
        assert variant.shared_bytes + 1024 <= H200.shared_bytes_per_block
        assert attention_prefill.pick_hopper_variant(H200, head_dim, DType.E4M3) is None
        assert attention_prefill.pick_hopper_variant(RTX_3090, head_dim, DType.BF16) is None
    assert attention_prefill.pick_hopper_variant(H200, 256, DType.BF16) is None


def test_scales_belong_to_e4m3_pages() -> None:
    def attend(pages: DType, scales: Tensor | None) -> None:
        attention_prefill.attention_prefill(
            NO_LIBRARY,
            H200,
            query=tensor(3, 4, 64),
            k_pages=tensor(5, 2, 64, 64, dtype=pages),
            v_pages=tensor(5, 2, 64, 64, dtype=pages),
            block_table=tensor(1, 4, dtype=DType.I32),
            tiles=tensor(1, 8, dtype=DType.I32),
            n_tiles=tensor(1, dtype=DType.I32),
            out=tensor(3, 4, 64),
            scale=0.125,
            k_scales=scales,
            v_scales=scales,
        )

    with pytest.raises(ValueError, match="k_scales belongs to e4m3 pages"):
        attend(DType.E4M3, None)
    with pytest.raises(ValueError, match="k_scales belongs to e4m3 pages"):
        attend(DType.BF16, tensor(5, 2, dtype=DType.F32))
    with pytest.raises(ValueError, match=r"k_scales must be f32 \[5, 2\]"):
        attend(DType.E4M3, tensor(5, 3, dtype=DType.F32))


def test_sixteen_heads_per_kv_head_need_shared_memory() -> None:
    assert attention_decode.pick_variant(RTX_3090, 128, 16).warps == 2
    assert attention_decode.pick_variant(H200, 256, 16).warps == 4
    with pytest.raises(ValueError, match="no variant for head_dim 256 in 101376 B"):
        attention_decode.pick_variant(RTX_3090, 256, 16)


def test_what_no_variant_covers_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim 96"):
        attention_decode.pick_variant(H200, 96, 4)
    with pytest.raises(ValueError, match="17 query heads per kv head"):
        attention_decode.pick_variant(H200, 128, 17)
    with pytest.raises(ValueError, match="head_dim 512"):
        attention_prefill.pick_variant(H200, 512)


@pytest.mark.parametrize("group", [1, 3, 7, 16])
@pytest.mark.parametrize("variant", attention_prefill.VARIANTS, ids=str)
def test_tile_list_covers_every_row_once(group: int, variant: attention_prefill.PrefillVariant) -> None:
    lengths, starts = [1, 64, 500, 7], [0, 9, 100, 3]
    tiles = attention_prefill.tile_list([4, 5, 6, 7], lengths, starts, group, variant)
    assert len(tiles) <= attention_prefill.most_tiles(sum(lengths), len(lengths), group, variant)
    seen: list[tuple[int, int]] = []
    last_keys = []
    for slot, row, length, start, packed in tiles[:, :5].tolist():
        segment = slot - 4
        assert (length, start, row) == (lengths[segment], starts[segment], sum(lengths[:segment]))
        end = min(packed + variant.rows, length * group)
        seen += [(slot, i) for i in range(packed, end)]
        last_keys.append(start + (end - 1) // group)
    assert len(set(seen)) == len(seen) == sum(lengths) * group
    assert last_keys == sorted(last_keys, reverse=True), "the longest rows come first"


def test_starts_are_staged_with_their_lists() -> None:
    shape = slots.SlotShape(slots=4, vocab=100, max_stop=3, max_bias=2)
    prompt, output = np.array([5, 6], np.int32), np.array([7], np.int32)
    staged = slots.stage_starts(
        [
            slots.SlotSetup(
                slot=2, seed=2**64 - 1, stop_ids=(9, 8), bias={3: 1.5}, prompt=prompt, output=output
            ),
            slots.SlotSetup(
                slot=0,
                presence_penalty=0.5,
                stop_ids=(1,),
                bias={4: -2.0, 5: 3.0},
                prompt=prompt,
                output=output,
            ),
        ],
        shape,
    )
    first, second = staged.starts
    assert (first["slot"], first["n_output"], first["n_tokens"]) == (2, 1, 0), "no penalty: nothing to count"
    assert first["sampling"]["seed"] == 2**64 - 1
    assert (second["n_tokens"], second["sampling"]["penalised"]) == (3, 1)
    for start, stops, biases in ((first, [8, 9], {3: 1.5}), (second, [1], {4: -2.0, 5: 3.0})):
        stop = slice(start["first_stop"], start["first_stop"] + start["sampling"]["n_stop"])
        bias = slice(start["first_bias"], start["first_bias"] + start["sampling"]["n_bias"])
        assert staged.tokens[stop].tolist() == stops
        assert (
            dict(zip(staged.bias_ids[bias].tolist(), staged.bias_values[bias].tolist(), strict=True))
            == biases
        )
    assert staged.tokens[second["first_token"] :][:3].tolist() == [5, 6, 7]
    with pytest.raises(ValueError, match="slot 1: 4 stop tokens"):
        slots.stage_starts([slots.SlotSetup(slot=1, stop_ids=(1, 2, 3, 4))], shape)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"norm\.cu: delta must be bf16 \[3, 64\]"):
        norm.add_rms_norm(
            NO_LIBRARY,
            residual=tensor(3, 64),
            delta=tensor(2, 64),
            weight=tensor(64),
            out=tensor(3, 64),
            epsilon=1e-6,
        )
    with pytest.raises(ValueError, match=r"residual must be bf16 \[3, 64\], got f32"):
        norm.add_rms_norm(
            NO_LIBRARY,
            residual=tensor(3, 64, dtype=DType.F32),
            weight=tensor(64),
            out=tensor(3, 64),
            epsilon=1e-6,
        )
    out = tensor(2, 64, dtype=DType.F32)
    with pytest.raises(ValueError, match=r"embedding\.cu: out must be bf16 \[2, 64\], got f32"):
        embedding.embed(NO_LIBRARY, table=tensor(9, 64), out=out, tokens=tensor(2, dtype=DType.I32))
    with pytest.raises(ValueError, match="hidden 20 must be a multiple of 8"):
        norm.add_rms_norm(
            NO_LIBRARY, residual=tensor(3, 20), weight=tensor(20), out=tensor(3, 20), epsilon=1e-6
        )
    with pytest.raises(ValueError, match="scale belongs to an e4m3 result"):
        norm.add_rms_norm(
            NO_LIBRARY,
            residual=tensor(3, 64),
            weight=tensor(64),
            out=tensor(3, 64, dtype=DType.E4M3),
            epsilon=1e-6,
        )
    with pytest.raises(ValueError, match=r"gate_up must be bf16 \[2, 32\]"):
        activation.gated_activation(NO_LIBRARY, gate_up=tensor(2, 16), out=tensor(2, 16))
    with pytest.raises(ValueError, match="either tokens, or row_slot and slot_token"):
        embedding.embed(NO_LIBRARY, table=tensor(9, 64), out=tensor(2, 64))
    with pytest.raises(ValueError, match="not aligned to 16 bytes"):
        activation.gated_activation(NO_LIBRARY, gate_up=tensor(2, 32, address=4100), out=tensor(2, 16))


def test_rotations_that_no_lane_layout_serves_are_refused() -> None:
    arguments = {
        "row_slot": tensor(1, dtype=DType.I32),
        "block_table": tensor(1, 4, dtype=DType.I32),
        "q_out": tensor(1, 1, 128),
        "k_pages": tensor(4, 1, 64, 128),
        "v_pages": tensor(4, 1, 64, 128),
        "row_position": tensor(1, dtype=DType.I32),
    }
    table = tensor(256, 6, dtype=DType.F32)
    heads = rope.HeadInput(tensor(1, 3 * 128), cosines=table, sines=table)
    with pytest.raises(ValueError, match="12 of 128 elements cannot be rotated"):
        rope.rope_and_write(NO_LIBRARY, heads=heads, **arguments)


def test_logits_with_an_odd_stride_are_refused() -> None:
    shape = slots.SlotShape(slots=2, vocab=100)
    buffers = {name: Tensor(4096, s, t) for name, (s, t) in shape.buffers().items()}
    state = slots.SlotBuffers(shape, **buffers)
    scratch = {
        name: Tensor(4096, s, t) for name, (s, t) in sampling.SampleShape(2, 104, 100).scratch().items()
    }
    row = tensor(2, dtype=DType.I32)
    for stride in (96, 100):
        with pytest.raises(ValueError, match="multiple of 8 and at least the vocabulary"):
            sampling.sample(
                NO_LIBRARY, logits=tensor(2, stride, dtype=DType.F32), row_slot=row, slots=state,
                scratch=sampling.SampleScratch(**scratch), tokens=row, statuses=row, first_token=True,
            )  # fmt: skip
