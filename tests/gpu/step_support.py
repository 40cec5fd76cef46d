"""Random layers of decode attention: raw rows, caches in bf16 or e4m3, and what should become of both."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from kernel_support import BF16, Gpu, assert_close, attention_reference, random_bf16

from kernels.rope import HeadInput
from kernels.tensor import Tensor

E4M3 = ml_dtypes.float8_e4m3fn
E4M3_MAX = 448.0
LEAST_SCALE = 2.0**-32
PAGE = 64


def scale_for(magnitude: np.ndarray) -> np.ndarray:
    """The smallest power of two, from 2^−32 on, with magnitude ≤ 448 · scale."""
    exponent = np.ceil(np.log2(np.maximum(magnitude.astype(np.float64), 2.0**-60) / E4M3_MAX))
    return np.maximum(2.0**exponent, LEAST_SCALE).astype(np.float32)


def to_e4m3(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -E4M3_MAX, E4M3_MAX).astype(np.float32).astype(E4M3)


class RawRows:
    """Raw q|k|v rows, and the queries, keys and values that they stand for."""

    def __init__(
        self,
        rng: np.random.Generator,
        rows: int,
        heads: tuple[int, int],
        head_dim: int,
        rotated: int,
        positions: int,
        *,
        bias: bool = False,
        norm: bool = False,
        scaled: bool = False,
    ) -> None:
        self.n_heads, self.n_kv_heads = heads
        self.head_dim, self.half = head_dim, rotated // 2
        width = (self.n_heads + 2 * self.n_kv_heads) * head_dim
        self.qkv = random_bf16(rng, rows, width)
        self.optional: dict[str, np.ndarray] = {}
        if bias:
            self.optional["bias"] = random_bf16(rng, width)
        if norm:
            self.optional["q_norm"] = random_bf16(rng, head_dim)
            self.optional["k_norm"] = random_bf16(rng, head_dim)
        if scaled:
            self.optional["weight_scale"] = rng.uniform(0.2, 2, width).astype(np.float32)
            self.optional["row_scale"] = rng.uniform(0.2, 2, rows).astype(np.float32)
        angles = rng.uniform(-np.pi, np.pi, (positions, self.half))
        self.cosines, self.sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def upload(self, gpu: Gpu) -> HeadInput:
        optional = {name: gpu.upload(array) for name, array in self.optional.items()}
        tables = gpu.upload(self.cosines), gpu.upload(self.sines)
        return HeadInput(gpu.upload(self.qkv), *tables, **optional, norm_offset=1.0)

    def expected(self, rows: Any, positions: Any) -> list[np.ndarray]:
        """q, k and v in float64, [rows, heads, head_dim] each."""
        have = {name: array.astype(np.float64) for name, array in self.optional.items()}
        x = self.qkv[rows].astype(np.float64)
        if "row_scale" in have:
            x = x * have["weight_scale"] * have["row_scale"][rows][:, None]
        x = x + have.get("bias", 0.0)
        parts = np.split(
            x.reshape(len(x), -1, self.head_dim), [self.n_heads, self.n_heads + self.n_kv_heads], axis=1
        )
        c, s = (table[positions].astype(np.float64)[:, None] for table in (self.cosines, self.sines))
        for i, name in enumerate(("q_norm", "k_norm")):
            y = parts[i]
            if name in have:
                y = y / np.sqrt(np.mean(y * y, axis=-1, keepdims=True) + 1e-6) * (1.0 + have[name])
            a, b, rest = y[..., : self.half], y[..., self.half : 2 * self.half], y[..., 2 * self.half :]
            parts[i] = np.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)
        return parts


class Cache:
    """Keys and values of sequences in shuffled pages. What is past a sequence's end is NaN, scales too."""

    def __init__(
        self,
        rng: np.random.Generator,
        lengths: list[int],
        room: list[int],
        n_kv_heads: int,
        head_dim: int,
        *,
        quantised: bool,
    ) -> None:
        """lengths: keys that are there; room: positions that pages are for."""
        self.quantised = quantised
        needed = [-(-n // PAGE) for n in room]
        pages = sum(needed) + 2
        order = iter(rng.permutation(pages).tolist())
        self.block_table = np.full((len(lengths), max(needed) + 1), -1, np.int32)
        shape = (2, pages, n_kv_heads, PAGE, head_dim)
        self.pages = np.full(shape, np.nan, E4M3 if quantised else BF16)
        self.scales = np.full(shape[:3], np.nan, np.float32)
        for slot, length in enumerate(lengths):
            for index in range(needed[slot]):
                page = self.block_table[slot, index] = next(order)
                count = min(PAGE, length - index * PAGE)
                if count <= 0:
                    continue
                values = rng.standard_normal((2, n_kv_heads, count, head_dim), np.float32)
                if quantised:  # some heads small, so that what comes raises their scales
                    values[1] *= np.exp2(rng.integers(-4, 2, (n_kv_heads, 1, 1)))
                    values[0] *= np.exp2(rng.integers(-2, 1, (n_kv_heads, 1, 1)))
                    scale = scale_for(np.abs(values).max(axis=(2, 3)))
                    self.scales[:, page] = scale
                    self.pages[:, page, :, :count] = to_e4m3(values / scale[..., None, None])
                else:
                    self.pages[:, page, :, :count] = values

    def upload(self, gpu: Gpu) -> dict[str, Tensor]:
        """The arguments of kernels."""
        tensors = {"k_pages": gpu.upload(self.pages[0]), "v_pages": gpu.upload(self.pages[1])}
        if self.quantised:
            tensors |= {"k_scales": gpu.upload(self.scales[0]), "v_scales": gpu.upload(self.scales[1])}
        return tensors

    def download(self, gpu: Gpu, tensors: dict[str, Tensor]) -> None:
        """Takes over what kernels made of it."""
        self.pages = np.stack([gpu.download(tensors["k_pages"]), gpu.download(tensors["v_pages"])])
        if self.quantised:
            self.scales = np.stack([gpu.download(tensors["k_scales"]), gpu.download(tensors["v_scales"])])

    def write(self, slot: int, first: int, values: np.ndarray) -> None:
        """Positions first … of one page, by the protocol. values: [2, positions, n_kv_heads, head_dim]."""
        page, at = self.block_table[slot, first // PAGE], first % PAGE
        values = values.transpose(0, 2, 1, 3)
        stop = at + values.shape[2]
        if self.quantised:
            needed = scale_for(np.abs(values).max(axis=(2, 3)))
            old = self.scales[:, page]
            scale = needed if at == 0 else np.maximum(needed, old)
            if at:
                ratio = (old / scale)[..., None, None]
                self.pages[:, page, :, :at] = to_e4m3(self.pages[:, page, :, :at].astype(np.float32) * ratio)
            self.scales[:, page] = scale
            values = to_e4m3(values / scale[..., None, None])
        self.pages[:, page, :, at:stop] = values.astype(self.pages.dtype)

    def gather(self, slot: int, length: int) -> np.ndarray:
        """float64 [2, length, n_kv_heads, head_dim]."""
        pages = self.block_table[slot, : -(-length // PAGE)]
        rows = self.pages[:, pages].astype(np.float64)
        if self.quantised:
            rows = rows * self.scales[:, pages][..., None, None]
        rows = rows.transpose(0, 1, 3, 2, 4).reshape(2, -1, rows.shape[2], rows.shape[4])
        return rows[:, :length]

    def check(self, want: Cache) -> None:
        """Equal to what was wanted, but for the last bit of what was written; nothing else has changed."""
        if self.quantised:
            assert np.array_equal(self.scales, want.scales, equal_nan=True), "scales"
            scale = np.nan_to_num(want.scales, nan=1.0)[..., None, None].astype(np.float64)
        else:
            scale = np.ones((*want.pages.shape[:3], 1, 1))
        got64, want64 = self.pages.astype(np.float64) * scale, want.pages.astype(np.float64) * scale
        assert np.array_equal(np.isnan(got64), np.isnan(want64)), "other places were written"
        rtol = 2**-3 if self.quantised else 2**-7
        atol = scale * 2**-9 if self.quantised else 2e-2 * 2**-6
        bad = np.abs(np.nan_to_num(got64) - np.nan_to_num(want64)) > atol + rtol * np.abs(
            np.nan_to_num(want64)
        )
        assert not bad.any(), f"{int(bad.sum())} elements, first at {np.argwhere(bad)[0]}"
        differ = np.mean(np.nan_to_num(got64) != np.nan_to_num(want64))
        assert differ < 0.02, f"{differ:.1%} of the cache differ, more than roundings explain"


def check_attention(
    name: str,
    got: np.ndarray,
    query: np.ndarray,
    cached: np.ndarray,
    scale: float,
    window: int | None = None,
) -> None:
    """One row's result against float64. query: [n_heads, head_dim]; cached: [2, context, n_kv, head_dim]."""
    want = attention_reference(query, cached[0], cached[1], cached.shape[1] - 1, scale, window)
    unit = float(np.abs(cached[1]).max())
    assert_close(name, got, want, rtol=2**-7, atol=4e-3 * max(1.0, unit / 4))
