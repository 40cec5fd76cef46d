"""Numpy twins of the kernels of a forward pass, on a launch's own arguments; addresses are host memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.unit import cuda_twin_fp8 as fp8
from tests.unit.cuda_twin_memory import BF16, C_TYPES, F32, I32, PAGE, array
from tests.unit.cuda_twin_weights import decoded


def embed(
    grid: Any,
    kinds: list[str],
    table: int,
    tokens: int,
    row_slot: int,
    slot_token: int,
    out: int,
    vocab: int,
    hidden: int,
    scale: float,
) -> None:
    rows = grid[0]
    result = array(out, C_TYPES[kinds[0]], rows, hidden)
    weights = array(table, BF16, vocab, hidden)
    for row in range(rows):
        if tokens:
            token = int(array(tokens, I32, rows)[row])
        else:
            slot = int(array(row_slot, I32, rows)[row])
            token = -1 if slot < 0 else int(array(slot_token + 4 * slot, I32, 1)[0])
        result[row] = weights[token].astype(F32) * scale if 0 <= token < vocab else 0.0


def norm(
    grid: Any,
    kinds: list[str],
    residual: int,
    delta: int,
    delta_weight_scale: int,
    delta_row_scale: int,
    weight: int,
    row_index: int,
    out: int,
    scale: int,
    hidden: int,
    epsilon: float,
    offset: float,
) -> None:
    rows = grid[0]
    result = np.empty((rows, hidden), F32)
    weights = array(weight, BF16, hidden).astype(F32)
    dtype = C_TYPES[kinds[0]]
    assert (kinds[2] == "true") == (delta_weight_scale != 0) == (delta_row_scale != 0)
    for row in range(rows):
        source = int(array(row_index, I32, rows)[row]) if row_index else row
        place = array(residual + source * hidden * dtype.itemsize, dtype, hidden)
        values = place.astype(F32)
        if delta:
            added = array(delta + source * hidden * 2, BF16, hidden).astype(F32)
            if delta_weight_scale:
                added *= array(delta_weight_scale, F32, hidden)
                added *= array(delta_row_scale + source * 4, F32, 1)
            values = (values + added).astype(dtype).astype(F32)
            if not row_index:
                place[:] = values
        result[row] = values / np.sqrt(np.mean(values * values) + epsilon) * (offset + weights)
    fp8.store(result, kinds[1] == "true", out, scale)


def gated(
    grid: Any,
    kinds: list[str],
    gate_up: int,
    weight_scale: int,
    row_scale: int,
    out: int,
    inter: int,
) -> None:
    gated_rows(grid[1], kinds, gate_up, weight_scale, row_scale, out, 0, inter)


def gated_quantised(
    grid: Any,
    kinds: list[str],
    gate_up: int,
    weight_scale: int,
    row_scale: int,
    out: int,
    scale: int,
    inter: int,
) -> None:
    gated_rows(grid[0] // int(kinds[2]), kinds, gate_up, weight_scale, row_scale, out, scale, inter)


def gated_rows(
    rows: int,
    kinds: list[str],
    gate_up: int,
    weight_scale: int,
    row_scale: int,
    out: int,
    scale: int,
    inter: int,
) -> None:
    both = array(gate_up, BF16, rows, 2 * inter).astype(F32)
    assert (kinds[1] == "true") == (weight_scale != 0) == (row_scale != 0)
    if weight_scale:
        both *= array(weight_scale, F32, 2 * inter)
        both *= array(row_scale, F32, rows)[:, None]
    gate, up = both[:, :inter], both[:, inter:]
    if kinds[0] == "true":
        gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    else:
        gate = gate / (1 + np.exp(-gate))
    fp8.store(gate * up, scale != 0, out, scale)


def skinny(
    grid: Any,
    kinds: list[str],
    x: int,
    weights: int,
    scales: int,
    gains: int,
    y: int,
    rows: int,
    n: int,
    k: int,
    epsilon: float,
    offset: float,
) -> None:
    decoder, out, finish, norm, most_rows = (
        kinds[0],
        C_TYPES[kinds[1]],
        int(kinds[2]),
        kinds[3],
        int(kinds[4]),
    )
    assert 1 <= grid[0] <= n // 16
    assert (n % 16, k % 32) == (0, 0)
    assert rows <= most_rows
    inputs = array(x, BF16, rows, k).astype(F32)
    if norm == "true":
        inputs /= np.sqrt(np.mean(inputs * inputs, axis=1, keepdims=True) + epsilon)
        inputs *= offset + array(gains, BF16, k).astype(F32)
    products = inputs @ decoded(decoder, weights, scales, n * (1 + (finish == 2)), k).T
    target = array(y, out, rows, n)
    if finish == 1:
        target[:] = target.astype(F32) + products
    elif finish == 2:
        gate = products[:, :n]
        target[:] = gate / (1 + np.exp(-gate)) * products[:, n:]
    else:
        target[:] = products


def rope(
    grid: Any,
    kinds: list[str],
    qkv: int,
    bias: int,
    q_norm: int,
    k_norm: int,
    cosines: int,
    sines: int,
    row_slot: int,
    row_position: int,
    slot_position: int,
    slot_active: int,
    block_table: int,
    q_out: int,
    k_pages: int,
    v_pages: int,
    n_heads: int,
    n_kv: int,
    half: int,
    width: int,
    epsilon: float,
    offset: float,
) -> None:
    rows, dim = grid[1], int(kinds[0])
    heads = n_heads + 2 * n_kv
    for row in range(rows):
        slot = int(array(row_slot, I32, rows)[row])
        if slot < 0 or (not row_position and not array(slot_active + 4 * slot, I32, 1)[0]):
            continue
        place = row_position + 4 * row if row_position else slot_position + 4 * slot
        position = int(array(place, I32, 1)[0])
        x = array(qkv + row * heads * dim * 2, BF16, heads, dim).astype(F32)
        if bias:
            x += array(bias, BF16, heads, dim).astype(F32)
        for first, last, norm in ((0, n_heads, q_norm), (n_heads, n_heads + n_kv, k_norm)):
            part = x[first:last]
            if norm:
                part /= np.sqrt(np.mean(part * part, axis=1, keepdims=True) + epsilon)
                part *= offset + array(norm, BF16, dim).astype(F32)
            cosine = array(cosines + position * half * 4, F32, half)
            sine = array(sines + position * half * 4, F32, half)
            low, high = part[:, :half].copy(), part[:, half : 2 * half].copy()
            part[:, :half], part[:, half : 2 * half] = low * cosine - high * sine, high * cosine + low * sine
        array(q_out + row * n_heads * dim * 2, BF16, n_heads, dim)[:] = x[:n_heads]
        page = int(array(block_table + 4 * (slot * width + position // PAGE), I32, 1)[0])
        for pages, values in ((k_pages, x[n_heads : n_heads + n_kv]), (v_pages, x[n_heads + n_kv :])):
            tile = array(pages + page * n_kv * PAGE * dim * 2, BF16, n_kv, PAGE, dim)
            tile[:, position % PAGE] = values


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


def gather(
    pages: int, block_table: int, width: int, slot: int, begin: int, end: int, n_kv: int, dim: int
) -> np.ndarray:
    table = array(block_table + 4 * slot * width, I32, width)
    rows = [
        array(pages + int(table[p // PAGE]) * n_kv * PAGE * dim * 2, BF16, n_kv, PAGE, dim)[:, p % PAGE]
        for p in range(begin, end)
    ]
    return np.stack(rows).astype(F32)


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
        k, v = (gather(p, block_table, width, slot, begin, end, n_kv, dim) for p in (k_pages, v_pages))
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
    assert kinds[-1] == "bf16", "e4m3 pages have no twin yet"
    assert not k_scales
    assert not v_scales
    dim = int(kinds[0])
    count = int(array(n_tiles, I32, 1)[0])
    assert count <= grid[1]
    segments = {tuple(tile[:4]) for tile in array(tiles, I32, count, 8).tolist()}
    for slot, first, length, start in segments:
        k, v = (gather(p, block_table, width, slot, 0, start + length, n_kv, dim) for p in (k_pages, v_pages))
        size = n_heads * dim * 2
        for row in range(length):
            end = start + row + 1
            begin = max(0, end - window) if window else 0
            q = array(query + (first + row) * size, BF16, n_heads, dim).astype(F32)
            result = array(out + (first + row) * size, BF16, n_heads, dim)
            result[:] = attend(q, k[begin:end], v[begin:end], scale)
