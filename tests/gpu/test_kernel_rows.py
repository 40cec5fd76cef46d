"""Norms, activations, embeddings and rope against float64, at awkward row counts."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_support import BF16, Gpu, assert_close, assert_untouched, random_bf16

from kernels.activation import gated_activation
from kernels.embedding import embed
from kernels.norm import add_rms_norm
from kernels.rope import HeadInput, rope_and_write
from kernels.tensor import DType

pytestmark = pytest.mark.gpu
ROWS = (1, 2, 3, 7, 8, 17, 31, 33, 64, 65, 200)


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float, offset: float) -> np.ndarray:
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    return x / np.sqrt(mean + epsilon) * (offset + weight.astype(np.float64))


@pytest.mark.parametrize("hidden", [64, 576, 2048, 4096, 5120, 8200, 16384])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_add_rms_norm(gpu: Gpu, rng: np.random.Generator, hidden: int, offset: float) -> None:
    """The sum is rounded once, and the norm is of what the rounding leaves."""
    for rows in ROWS:
        residual = random_bf16(rng, rows, hidden, scale=3.0)
        delta, weight = random_bf16(rng, rows, hidden), random_bf16(rng, hidden)
        added = (residual.astype(np.float32) + delta.astype(np.float32)).astype(BF16)
        stream, out = gpu.upload(residual), gpu.empty((rows, hidden), DType.BF16)
        gpu.run(
            add_rms_norm(
                gpu.library,
                residual=stream,
                delta=gpu.upload(delta),
                weight=gpu.upload(weight),
                out=out,
                epsilon=1e-6,
                weight_offset=offset,
            )
        )
        assert_close("residual", gpu.download(stream), added, rtol=0, atol=0)
        want = rms_norm(added.astype(np.float64), weight, 1e-6, offset)
        assert_close("out", gpu.download(out), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("hidden", [576, 2048, 12288])
def test_rms_norm_of_picked_rows(gpu: Gpu, rng: np.random.Generator, hidden: int) -> None:
    residual, delta = random_bf16(rng, 40, hidden), random_bf16(rng, 40, hidden)
    weight, index = random_bf16(rng, hidden), rng.integers(0, 40, 17).astype(np.int32)
    stream, out = gpu.upload(residual), gpu.empty((17, hidden), DType.BF16)
    gpu.run(
        add_rms_norm(
            gpu.library,
            residual=stream,
            delta=gpu.upload(delta),
            weight=gpu.upload(weight),
            out=out,
            epsilon=1e-5,
            row_index=gpu.upload(index),
        )
    )
    assert_close("residual", gpu.download(stream), residual, rtol=0, atol=0)
    added = (residual.astype(np.float32) + delta.astype(np.float32)).astype(BF16)
    want = rms_norm(added[index].astype(np.float64), weight, 1e-5, 0.0)
    assert_close("out", gpu.download(out), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("hidden", [64, 2048, 16384])
def test_rms_norm_quantises_rows(gpu: Gpu, rng: np.random.Generator, hidden: int) -> None:
    residual, weight = random_bf16(rng, 33, hidden), random_bf16(rng, hidden)
    residual[5] = 0
    out, scale = gpu.empty((33, hidden), DType.E4M3), gpu.empty((33,), DType.F32)
    gpu.run(
        add_rms_norm(
            gpu.library,
            residual=gpu.upload(residual),
            weight=gpu.upload(weight),
            out=out,
            scale=scale,
            epsilon=1e-6,
        )
    )
    want = rms_norm(residual.astype(np.float64), weight, 1e-6, 0.0)
    largest = np.abs(want).max(axis=1)
    scales = gpu.download(scale).astype(np.float64)
    assert_close("scale", scales, np.where(largest > 0, largest / 448, 1.0), rtol=1e-5, atol=0)
    got = gpu.download(out).astype(np.float32).astype(np.float64) * scales[:, None]
    steps = np.maximum(np.abs(want) * 2**-4, scales[:, None] * 2**-9)  # half a unit in e4m3's last place
    assert (np.abs(got - want) <= steps * 1.01 + 1e-12).all()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("inter", [8, 264, 1536, 6144])
def test_gated_activation(gpu: Gpu, rng: np.random.Generator, activation: str, inter: int) -> None:
    for rows in ROWS:
        gate_up = random_bf16(rng, rows, 2 * inter, scale=4.0)
        out = gpu.empty((rows, inter), DType.BF16)
        gpu.run(gated_activation(gpu.library, gate_up=gpu.upload(gate_up), out=out, activation=activation))
        gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
        if activation == "silu":
            acted = gate / (1 + np.exp(-gate))
        else:
            acted = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        assert_close("out", gpu.download(out), acted * up, rtol=2**-7, atol=1e-5)


def test_embed(gpu: Gpu, rng: np.random.Generator) -> None:
    table = random_bf16(rng, 1000, 576)
    for rows in ROWS:
        tokens = rng.integers(0, 1000, rows).astype(np.int32)
        tokens[rows // 2] = 1000 if rows > 2 else tokens[rows // 2]
        out = gpu.empty((rows, 576), DType.BF16)
        gpu.run(embed(gpu.library, table=gpu.upload(table), tokens=gpu.upload(tokens), out=out, scale=24.0))
        known = tokens < 1000
        want = np.where(known[:, None], table[np.where(known, tokens, 0)].astype(np.float32) * 24, 0)
        assert_close("out", gpu.download(out), want.astype(BF16), rtol=0, atol=0)


def test_embed_of_slots(gpu: Gpu, rng: np.random.Generator) -> None:
    table, last = random_bf16(rng, 100, 64), rng.integers(0, 100, 9).astype(np.int32)
    row_slot = np.array([3, -1, 8, 0], np.int32)
    out = gpu.empty((4, 64), DType.BF16)
    gpu.run(
        embed(
            gpu.library,
            table=gpu.upload(table),
            row_slot=gpu.upload(row_slot),
            slot_token=gpu.upload(last),
            out=out,
        )
    )
    want = np.where(row_slot[:, None] >= 0, table[last[row_slot]].astype(np.float64), 0)
    assert_close("out", gpu.download(out), want, rtol=0, atol=0)


class RopeCase:
    """Merged rows of shuffled slots with their pages, and what should become of them."""

    def __init__(
        self,
        rng: np.random.Generator,
        rows: int,
        heads: tuple[int, int],
        head_dim: int,
        rotated: int,
        bias: bool,
        norm: bool,
    ) -> None:
        self.n_heads, self.n_kv_heads = heads
        self.head_dim, self.half = head_dim, rotated // 2
        total = self.n_heads + 2 * self.n_kv_heads
        self.qkv = random_bf16(rng, rows, total * head_dim)
        self.bias = random_bf16(rng, total * head_dim) if bias else None
        self.q_norm = random_bf16(rng, head_dim) if norm else None
        self.k_norm = random_bf16(rng, head_dim) if norm else None
        self.slots, self.width = rows + 3, 6
        angles = rng.uniform(-np.pi, np.pi, (self.width * 64, self.half))
        self.cosines, self.sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.row_slot = rng.permutation(self.slots)[:rows].astype(np.int32)
        self.slot_position = rng.integers(0, self.width * 64, self.slots).astype(np.int32)
        self.slot_active = (rng.random(self.slots) < 0.7).astype(np.int32)
        if rows > 2:
            self.row_slot[1] = -1
        pages = self.slots * self.width
        self.block_table = rng.permutation(pages).astype(np.int32).reshape(self.slots, self.width)

    def expected(self, rows: list[int], offset: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k and v of the given rows in float64: [rows, heads, head_dim] each."""
        x = self.qkv[rows].astype(np.float64)
        if self.bias is not None:
            x = x + self.bias.astype(np.float64)
        heads = self.n_heads + 2 * self.n_kv_heads
        q, k, v = np.split(
            x.reshape(len(rows), heads, self.head_dim), [self.n_heads, self.n_heads + self.n_kv_heads], axis=1
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, 1e-6, offset), rms_norm(k, self.k_norm, 1e-6, offset)
        position = self.slot_position[self.row_slot[rows]]
        c, s = (table[position].astype(np.float64)[:, None] for table in (self.cosines, self.sines))

        def turn(y: np.ndarray) -> np.ndarray:
            a, b, rest = y[..., : self.half], y[..., self.half : 2 * self.half], y[..., 2 * self.half :]
            return np.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)

        return turn(q), turn(k), v


@pytest.mark.parametrize("rows", [*ROWS, 300])
@pytest.mark.parametrize(
    ("heads", "head_dim", "rotated"),
    [
        ((9, 3), 64, 64),
        ((16, 8), 128, 128),
        ((7, 1), 128, 128),
        ((4, 2), 256, 256),
        ((6, 2), 256, 64),
        ((4, 4), 128, 32),
    ],
)
@pytest.mark.parametrize("decode", [False, True])
def test_rope_and_write(
    gpu: Gpu,
    rng: np.random.Generator,
    rows: int,
    heads: tuple[int, int],
    head_dim: int,
    rotated: int,
    decode: bool,
) -> None:
    bias, norm = rows % 2 == 1, rows % 3 != 1
    case = RopeCase(rng, rows, heads, head_dim, rotated, bias, norm)
    q_out = gpu.empty((rows, case.n_heads, head_dim), DType.BF16)
    pages_shape = (case.slots * case.width, case.n_kv_heads, 64, head_dim)
    k_pages, v_pages = gpu.empty(pages_shape, DType.BF16), gpu.empty(pages_shape, DType.BF16)
    where = case.row_slot >= 0
    if decode:
        where = where & (case.slot_active[case.row_slot] == 1)
        places = {
            "slot_position": gpu.upload(case.slot_position),
            "slot_active": gpu.upload(case.slot_active),
        }
    else:
        places = {"row_position": gpu.upload(case.slot_position[case.row_slot])}
    optional = {"bias": case.bias, "q_norm": case.q_norm, "k_norm": case.k_norm}
    gpu.run(
        rope_and_write(
            gpu.library,
            heads=HeadInput(
                gpu.upload(case.qkv),
                gpu.upload(case.cosines),
                gpu.upload(case.sines),
                norm_offset=1.0,
                **{k: gpu.upload(v) for k, v in optional.items() if v is not None},
            ),
            row_slot=gpu.upload(case.row_slot),
            block_table=gpu.upload(case.block_table),
            q_out=q_out,
            k_pages=k_pages,
            v_pages=v_pages,
            **places,
        )
    )
    written = [int(row) for row in np.flatnonzero(where)]
    q, k, v = case.expected(written, 1.0)
    got_q, got_k, got_v = gpu.download(q_out), gpu.download(k_pages), gpu.download(v_pages)
    assert_close("q", got_q[written], q, rtol=2**-7, atol=2e-2 * 2**-6)
    assert_untouched("q of inactive rows", got_q[~where])
    slots = case.row_slot[written]
    position = case.slot_position[slots]
    page, offset = case.block_table[slots, position // 64], position % 64
    assert_close("k", got_k[page, :, offset], k, rtol=2**-7, atol=2e-2 * 2**-6)
    assert_close("v", got_v[page, :, offset], v, rtol=2**-8, atol=0)
    got_k[page, :, offset], got_v[page, :, offset] = np.nan, np.nan
    assert np.isnan(got_k.astype(np.float32)).all(), "a key was written elsewhere"
    assert np.isnan(got_v.astype(np.float32)).all(), "a value was written elsewhere"
