"""Numpy twins of what lies between the q|k|v product and attention's result, over bf16 and e4m3 pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.unit.cuda_twin_memory import BF16, E4M3, F32, I32, PAGE, array

E4M3_MAX = 448.0
LEAST_SCALE = 2.0**-32


@dataclass
class Heads:
    """Raw rows of q|k|v and what makes heads of them."""

    addresses: tuple[int, ...]
    """qkv, bias, weight_scale, row_scale, q_norm, k_norm, cosines, sines."""
    n_heads: int
    n_kv: int
    dim: int
    half: int
    epsilon: float
    offset: float

    def row(self, row: int, position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k and v of a row, float32 [heads, dim]."""
        qkv, bias, weight_scale, row_scale, q_norm, k_norm, cosines, sines = self.addresses
        heads, dim, half = self.n_heads + 2 * self.n_kv, self.dim, self.half
        x = array(qkv + row * heads * dim * 2, BF16, heads, dim).astype(F32)
        if weight_scale:
            x *= array(weight_scale, F32, heads, dim) * array(row_scale + 4 * row, F32, 1)[0]
        if bias:
            x += array(bias, BF16, heads, dim).astype(F32)
        q, k, v = np.split(x, (self.n_heads, self.n_heads + self.n_kv))
        for part, norm in ((q, q_norm), (k, k_norm)):
            if norm:
                part /= np.sqrt(np.mean(part * part, axis=1, keepdims=True) + self.epsilon)
                part *= self.offset + array(norm, BF16, dim).astype(F32)
            cosine = array(cosines + position * half * 4, F32, half)
            sine = array(sines + position * half * 4, F32, half)
            low, high = part[:, :half].copy(), part[:, half : 2 * half].copy()
            part[:, :half], part[:, half : 2 * half] = low * cosine - high * sine, high * cosine + low * sine
        return q, k, v


@dataclass
class Pages:
    """Keys or values of a layer."""

    address: int
    scales: int
    """0 with bf16."""
    block_table: int
    width: int
    n_kv: int
    dim: int

    def page(self, slot: int, position: int) -> int:
        return int(array(self.block_table + 4 * (slot * self.width + position // PAGE), I32, 1)[0])

    def tile(self, page: int) -> np.ndarray:
        dtype = E4M3 if self.scales else BF16
        size = self.n_kv * PAGE * self.dim * dtype.itemsize
        return array(self.address + page * size, dtype, self.n_kv, PAGE, self.dim)

    def gather(self, slot: int, begin: int, end: int) -> np.ndarray:
        """float32 [end − begin, n_kv, dim]."""
        rows = []
        for position in range(begin, end):
            page = self.page(slot, position)
            row = self.tile(page)[:, position % PAGE].astype(F32)
            if self.scales:
                row *= array(self.scales + 4 * page * self.n_kv, F32, self.n_kv)[:, None]
            rows.append(row)
        return np.stack(rows)

    def write(self, slot: int, position: int, values: np.ndarray) -> None:
        """One or more positions of one page. values: float32 [positions, n_kv, dim]."""
        page, first = self.page(slot, position), position % PAGE
        tile = self.tile(page)
        values = values.transpose(1, 0, 2)
        if self.scales:
            scale = array(self.scales + 4 * page * self.n_kv, F32, self.n_kv)
            needed = scale_for(np.abs(values).max(axis=(1, 2)))
            raised = needed if first == 0 else np.maximum(needed, scale)
            if first:
                tile[:, :first] = tile[:, :first].astype(F32) * (scale / raised)[:, None, None]
            scale[:] = raised
            values = np.clip(values / raised[:, None, None], -E4M3_MAX, E4M3_MAX)
        tile[:, first : first + values.shape[1]] = values


def scale_for(magnitude: np.ndarray) -> np.ndarray:
    """The smallest power of two that keeps it within e4m3."""
    fraction, exponent = np.frexp(np.maximum(magnitude.astype(np.float64), 2.0**-100) / E4M3_MAX)
    return np.maximum(np.ldexp(1.0, exponent - (fraction == 0.5)), LEAST_SCALE).astype(F32)


def rope(grid: Any, kinds: list[str], *arguments: Any) -> None:
    heads, (row_slot, row_position, slot_position, slot_active, table, q_out, k_pages, v_pages) = (
        arguments[:8],
        arguments[8:16],
    )
    n_heads, n_kv, half, width, epsilon, offset = arguments[16:]
    dim, rows = int(kinds[0]), grid[1]
    source = Heads(heads, n_heads, n_kv, dim, half, epsilon, offset)
    for row, slot in enumerate(array(row_slot, I32, rows).tolist()):
        if slot < 0 or (not row_position and not array(slot_active + 4 * slot, I32, 1)[0]):
            continue
        place = row_position + 4 * row if row_position else slot_position + 4 * slot
        position = int(array(place, I32, 1)[0])
        q, k, v = source.row(row, position)
        array(q_out + row * n_heads * dim * 2, BF16, n_heads, dim)[:] = q
        for pages, values in ((k_pages, k), (v_pages, v)):
            Pages(pages, 0, table, width, n_kv, dim).write(slot, position, values[None])


def rope_and_quantise(grid: Any, kinds: list[str], *arguments: Any) -> None:
    heads, (row_slot, row_position, table, q_out), pages = arguments[:8], arguments[8:12], arguments[12:16]
    rows, n_heads, n_kv, half, width, epsilon, offset = arguments[16:]
    dim = int(kinds[0])
    assert grid == (n_heads + 2 * n_kv, -(-rows // 64), 1)
    source = Heads(heads, n_heads, n_kv, dim, half, epsilon, offset)
    slots, positions = array(row_slot, I32, rows).tolist(), array(row_position, I32, rows).tolist()
    runs: dict[tuple[int, int], list[int]] = {}
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        if slot >= 0:
            runs.setdefault((slot, position // PAGE), []).append(row)
    for (slot, _), members in runs.items():
        prepared = [source.row(row, positions[row]) for row in members]
        for row, (q, _, _) in zip(members, prepared, strict=True):
            array(q_out + row * n_heads * dim * 2, BF16, n_heads, dim)[:] = q
        for which in (0, 1):
            cache = Pages(pages[which], pages[2 + which], table, width, n_kv, dim)
            cache.write(slot, positions[members[0]], np.stack([parts[1 + which] for parts in prepared]))


def step(grid: Any, kinds: list[str], *arguments: Any) -> None:
    heads, (row_slot, slot_position, slot_active, table) = arguments[:8], arguments[8:12]
    k_pages, v_pages, k_scales, v_scales, out = arguments[12:17]
    n_heads, n_kv, half, width, window, epsilon, offset, scale = arguments[17:]
    dim, rows = int(kinds[1]), grid[2]
    assert (kinds[0] == "e4m3") == bool(k_scales)
    assert grid[1] == n_kv
    source = Heads(heads, n_heads, n_kv, dim, half, epsilon, offset)
    caches = [Pages(p, s, table, width, n_kv, dim) for p, s in ((k_pages, k_scales), (v_pages, v_scales))]
    result = array(out, BF16, rows, n_heads, dim)
    for row, slot in enumerate(array(row_slot, I32, rows).tolist()):
        if slot < 0 or not array(slot_active + 4 * slot, I32, 1)[0]:
            result[row] = 0
            continue
        position = int(array(slot_position + 4 * slot, I32, 1)[0])
        q, *newest = source.row(row, position)
        for cache, values in zip(caches, newest, strict=True):
            cache.write(slot, position, values[None])
        begin = max(0, position + 1 - window) if window else 0
        k, v = (cache.gather(slot, begin, position + 1) for cache in caches)
        rounded = q.astype(np.float16 if k_scales else BF16).astype(F32)
        result[row] = attend(rounded, k, v, scale)


def plan_decode(
    grid: Any,
    kinds: list[str],
    row_slot: int,
    slot_position: int,
    slot_active: int,
    splits: int,
    row_splits: int,
    n_splits: int,
    rows: int,
    window: int,
    min_pages: int,
    most: int,
) -> None:
    table = array(splits, I32, rows, 8)
    for row, slot in enumerate(array(row_slot, I32, rows).tolist()):
        active = slot >= 0 and array(slot_active + 4 * slot, I32, 1)[0]
        end = int(array(slot_position + 4 * slot, I32, 1)[0]) + 1 if active else 0
        begin = max(0, end - window) if window else 0
        table[row] = (row, slot, begin, end, begin, 0, 1, 0)
    array(n_splits, I32, 1)[0] = rows


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
    """q [heads, dim], keys and values [n, kv heads, dim]."""
    group = len(q) // keys.shape[1]
    result = np.zeros_like(q)
    for head in range(len(q)):
        scores = keys[:, head // group] @ q[head] * scale
        weights = np.exp(scores - scores.max())
        result[head] = weights @ values[:, head // group] / weights.sum()
    return result


def decode(
    grid: Any,
    kinds: list[str],
    query: int,
    k_pages: int,
    v_pages: int,
    block_table: int,
    splits: int,
    n_splits: int,
    partial_out: int,
    partial_totals: int,
    out: int,
    n_heads: int,
    n_kv: int,
    width: int,
    scale: float,
) -> None:
    dim, rows = int(kinds[0]), int(array(n_splits, I32, 1)[0])
    result = array(out, BF16, rows, n_heads, dim)
    for row, slot, begin, end, *_ in array(splits, I32, rows, 8).tolist():
        if end == 0:
            result[row] = 0
            continue
        k, v = (
            Pages(p, 0, block_table, width, n_kv, dim).gather(slot, begin, end) for p in (k_pages, v_pages)
        )
        q = array(query, BF16, rows, n_heads, dim)[row].astype(F32)
        result[row] = attend(q, k, v, scale)


def prefill(
    grid: Any,
    kinds: list[str],
    query: int,
    k_pages: int,
    v_pages: int,
    k_scales: int,
    v_scales: int,
    block_table: int,
    tiles: int,
    n_tiles: int,
    out: int,
    n_heads: int,
    n_kv: int,
    width: int,
    window: int,
    scale: float,
) -> None:
    assert (kinds[-1] == "e4m3") == bool(k_scales) == bool(v_scales)
    dim = int(kinds[0])
    count = int(array(n_tiles, I32, 1)[0])
    assert count <= grid[1]
    caches = [
        Pages(p, s, block_table, width, n_kv, dim) for p, s in ((k_pages, k_scales), (v_pages, v_scales))
    ]
    segments = {tuple(tile[:4]) for tile in array(tiles, I32, count, 8).tolist()}
    for slot, first, length, start in segments:
        k, v = (cache.gather(slot, 0, start + length) for cache in caches)
        size = n_heads * dim * 2
        for row in range(length):
            end = start + row + 1
            begin = max(0, end - window) if window else 0
            q = array(query + (first + row) * size, BF16, n_heads, dim).astype(F32)
            result = array(out + (first + row) * size, BF16, n_heads, dim)
            result[:] = attend(q, k[begin:end], v[begin:end], scale)


def prefill_wgmma(grid: Any, kinds: list[str], query: int, k_pages: int, v_pages: int, *rest: Any) -> None:
    """Blocks that stay, over bf16 pages; the same answer."""
    assert grid[1] == 1
    tiles = int(array(rest[2], I32, 1)[0])
    prefill((grid[0], tiles), [kinds[0], "bf16"], query, k_pages, v_pages, 0, 0, *rest)
