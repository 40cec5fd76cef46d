"""Numpy twins of the kernels of a forward pass, on a launch's own arguments; addresses are host memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.unit import cuda_twin_fp8 as fp8
from tests.unit.cuda_twin_memory import BF16, C_TYPES, F32, I32, array
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
    result = array(out, BF16, rows, hidden)
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
    assert (kinds[1] == "true") == (delta_weight_scale != 0) == (delta_row_scale != 0)
    for row in range(rows):
        source = int(array(row_index, I32, rows)[row]) if row_index else row
        place = array(residual + source * hidden * BF16.itemsize, BF16, hidden)
        values = place.astype(F32)
        if delta:
            added = array(delta + source * hidden * 2, BF16, hidden).astype(F32)
            if delta_weight_scale:
                added *= array(delta_weight_scale, F32, hidden)
                added *= array(delta_row_scale + source * 4, F32, 1)
            values = (values + added).astype(BF16).astype(F32)
            if not row_index:
                place[:] = values
        result[row] = values / np.sqrt(np.mean(values * values) + epsilon) * (offset + weights)
    fp8.store(result, kinds[0] == "true", out, scale)


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


def stream(
    grid: Any,
    kinds: list[str],
    x: int,
    quants: int,
    scales: int,
    gains: int,
    y: int,
    n: int,
    k: int,
    each: int,
    extra: int,
    stages: int,
    batch: int,
    epsilon: float,
    offset: float,
) -> None:
    """One row of q4_0: skinny's answer, from blocks that stay."""
    out, finish, norm = kinds[:3]
    warps, steps = map(int, kinds[3:5])
    assert grid[0] * each + extra == n // 16
    assert 0 <= extra < grid[0]
    assert k <= 64 * warps * steps
    assert (stages > 0, 0 < batch <= 2 * warps) == (True, True)
    shared = (x, quants, scales, gains, y)
    skinny(grid, ["Q4Weights", out, finish, norm, "1"], *shared, 1, n, k, epsilon, offset)


def stream_rows(
    grid: Any,
    kinds: list[str],
    x: int,
    weights: int,
    y: int,
    rows: int,
    shift: int,
    n: int,
    k: int,
    each: int,
    extra: int,
    stages: int,
    batch: int,
) -> None:
    """Several rows of bf16: skinny's answer, from blocks that stay."""
    finish, warps, steps = kinds[0], int(kinds[1]), int(kinds[2])
    assert grid[0] * each + extra == n // 16
    assert 0 <= extra < grid[0]
    assert k <= 32 * warps * steps
    assert rows <= 1 << shift
    assert (stages > 0, 0 < batch << (4 + shift) <= 32 * warps) == (True, True)
    skinny(grid, ["Bf16Weights", "bf16", finish, "false", "8"], x, weights, 0, 0, y, rows, n, k, 0.0, 0.0)
