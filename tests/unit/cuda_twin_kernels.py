"""Numpy twins of the CUDA kernels that read the packed arguments of a launch. Addresses are host memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from engine.reference.ops.logprobs import token_logprobs
from engine.reference.ops.philox import uniform
from engine.reference.ops.sampling import apply_penalties, greedy, sample
from kernels.sampling import RowStatus
from kernels.slots import SAMPLING_DTYPE, START_DTYPE, SlotArrays
from kernels.tensor import DType, Tensor

BF16 = np.dtype(ml_dtypes.bfloat16)
F32, I32, U32, U8 = (np.dtype(t) for t in (np.float32, np.int32, np.uint32, np.uint8))
_TYPES = {DType.BF16: BF16, DType.F32: F32, DType.I32: I32, DType.U32: U32, DType.U8: U8}
_C_TYPES = {"float": F32, "bf16": BF16}
_SCALARS = {"p": ctypes.c_uint64, "i": ctypes.c_int32, "f": ctypes.c_float, "S": SlotArrays, "x": None}
PAGE = 64


def array(address: int, dtype: np.dtype[Any], *shape: int) -> np.ndarray:
    """Host memory as an array."""
    size = prod(shape) * dtype.itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype).reshape(shape)


def view(tensor: Tensor) -> np.ndarray:
    return array(tensor.address, _TYPES[tensor.dtype], *tensor.shape)


def run(expression: str, grid: tuple[int, ...], pointers: int) -> None:
    """Carries out one launch."""
    name, _, parameters = expression.partition("<")
    arguments = [p.strip() for p in parameters.rstrip(">").split(",")] if parameters else []
    layout, twin = _TWINS[name]
    addresses = (ctypes.c_void_p * len(layout)).from_address(pointers)
    values = [_value(kind, address) for kind, address in zip(layout, addresses, strict=True)]
    if twin is not None:
        twin(grid, arguments, *values)


def _value(kind: str, address: int) -> Any:
    c_type = _SCALARS[kind]
    if c_type is None:
        return None
    value = c_type.from_address(address)
    return value if kind == "S" else value.value


def _slots(arrays: SlotArrays, name: str, dtype: np.dtype[Any], slot: int) -> np.ndarray:
    """One slot's entry of a per-slot array, as an array of one."""
    return array(getattr(arrays, name) + slot * dtype.itemsize, dtype, 1)


def _embed(grid: Any, kinds: list[str], table: int, tokens: int, row_slot: int, slot_token: int, out: int,
           vocab: int, hidden: int, scale: float) -> None:  # fmt: skip
    rows = grid[0]
    result = array(out, _C_TYPES[kinds[0]], rows, hidden)
    weights = array(table, BF16, vocab, hidden)
    for row in range(rows):
        if tokens:
            token = int(array(tokens, I32, rows)[row])
        else:
            slot = int(array(row_slot, I32, rows)[row])
            token = -1 if slot < 0 else int(array(slot_token + 4 * slot, I32, 1)[0])
        result[row] = weights[token].astype(F32) * scale if 0 <= token < vocab else 0.0


def _norm(grid: Any, kinds: list[str], residual: int, delta: int, weight: int, row_index: int, out: int,
          scale: int, hidden: int, epsilon: float, offset: float) -> None:  # fmt: skip
    rows = grid[0]
    result = array(out, BF16, rows, hidden)
    weights = array(weight, BF16, hidden).astype(F32)
    dtype = _C_TYPES[kinds[0]]
    for row in range(rows):
        source = int(array(row_index, I32, rows)[row]) if row_index else row
        place = array(residual + source * hidden * dtype.itemsize, dtype, hidden)
        values = place.astype(F32)
        if delta:
            values += array(delta + source * hidden * 2, BF16, hidden).astype(F32)
            if not row_index:
                place[:] = values
        result[row] = values / np.sqrt(np.mean(values * values) + epsilon) * (offset + weights)


def _gated(grid: Any, kinds: list[str], gate_up: int, out: int, inter: int) -> None:
    rows = grid[1]
    both = array(gate_up, BF16, rows, 2 * inter).astype(F32)
    gate, up = both[:, :inter], both[:, inter:]
    if kinds[0] == "true":
        gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    else:
        gate = gate / (1 + np.exp(-gate))
    array(out, BF16, rows, inter)[:] = gate * up


def _skinny(grid: Any, kinds: list[str], x: int, weights: int, gains: int, y: int, rows: int, n: int, k: int,
            epsilon: float, offset: float) -> None:  # fmt: skip
    assert grid[0] * 16 == n
    assert k % 32 == 0
    finish = int(kinds[1])
    inputs = array(x, BF16, rows, k).astype(F32)
    if kinds[2] == "true":
        inputs /= np.sqrt(np.mean(inputs * inputs, axis=1, keepdims=True) + epsilon)
        inputs *= offset + array(gains, BF16, k).astype(F32)
    products = inputs @ array(weights, BF16, n * (1 + (finish == 2)), k).astype(F32).T
    target = array(y, _C_TYPES[kinds[0]], rows, n)
    if finish == 1:
        target[:] = target.astype(F32) + products
    elif finish == 2:
        gate = products[:, :n]
        target[:] = gate / (1 + np.exp(-gate)) * products[:, n:]
    else:
        target[:] = products


def _rope(grid: Any, kinds: list[str], qkv: int, bias: int, q_norm: int, k_norm: int, cosines: int, sines: int,
          row_slot: int, row_position: int, slot_position: int, slot_active: int, block_table: int, q_out: int,
          k_pages: int, v_pages: int, n_heads: int, n_kv: int, half: int, width: int, epsilon: float,
          offset: float) -> None:  # fmt: skip
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


def _plan_decode(grid: Any, kinds: list[str], row_slot: int, slot_position: int, slot_active: int, splits: int,
                 row_splits: int, n_splits: int, rows: int, window: int, min_pages: int, most: int) -> None:  # fmt: skip
    table = array(splits, I32, rows, 8)
    for row, slot in enumerate(array(row_slot, I32, rows).tolist()):
        active = slot >= 0 and array(slot_active + 4 * slot, I32, 1)[0]
        end = int(array(slot_position + 4 * slot, I32, 1)[0]) + 1 if active else 0
        begin = max(0, end - window) if window else 0
        table[row] = (row, slot, begin, end, begin, 0, 1, 0)
    array(n_splits, I32, 1)[0] = rows


def _attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, cap: float) -> np.ndarray:
    """q [heads, dim], keys and values [n, kv heads, dim]."""
    group = len(q) // keys.shape[1]
    result = np.zeros_like(q)
    for head in range(len(q)):
        scores = keys[:, head // group] @ q[head] * scale
        if cap:
            scores = cap * np.tanh(scores / cap)
        weights = np.exp(scores - scores.max())
        result[head] = weights @ values[:, head // group] / weights.sum()
    return result


def _gather(
    pages: int, block_table: int, width: int, slot: int, begin: int, end: int, n_kv: int, dim: int
) -> np.ndarray:
    table = array(block_table + 4 * slot * width, I32, width)
    rows = [
        array(pages + int(table[p // PAGE]) * n_kv * PAGE * dim * 2, BF16, n_kv, PAGE, dim)[:, p % PAGE]
        for p in range(begin, end)
    ]
    return np.stack(rows).astype(F32)


def _decode(grid: Any, kinds: list[str], query: int, k_pages: int, v_pages: int, block_table: int, splits: int,
            n_splits: int, partial_out: int, partial_totals: int, out: int, n_heads: int, n_kv: int, width: int,
            scale: float, cap: float) -> None:  # fmt: skip
    dim, rows = int(kinds[0]), int(array(n_splits, I32, 1)[0])
    result = array(out, BF16, rows, n_heads, dim)
    for row, slot, begin, end, *_ in array(splits, I32, rows, 8).tolist():
        if end == 0:
            result[row] = 0
            continue
        k, v = (_gather(p, block_table, width, slot, begin, end, n_kv, dim) for p in (k_pages, v_pages))
        q = array(query, BF16, rows, n_heads, dim)[row].astype(F32)
        result[row] = _attend(q, k, v, scale, cap)


def _prefill(grid: Any, kinds: list[str], query: int, k_pages: int, v_pages: int, block_table: int, tiles: int,
             n_tiles: int, out: int, n_heads: int, n_kv: int, width: int, window: int, scale: float,
             cap: float) -> None:  # fmt: skip
    dim = int(kinds[0])
    count = int(array(n_tiles, I32, 1)[0])
    assert count <= grid[1]
    segments = {tuple(tile[:4]) for tile in array(tiles, I32, count, 8).tolist()}
    for slot, first, length, start in segments:
        k, v = (
            _gather(p, block_table, width, slot, 0, start + length, n_kv, dim) for p in (k_pages, v_pages)
        )
        size = n_heads * dim * 2
        for row in range(length):
            end = start + row + 1
            begin = max(0, end - window) if window else 0
            q = array(query + (first + row) * size, BF16, n_heads, dim).astype(F32)
            result = array(out + (first + row) * size, BF16, n_heads, dim)
            result[:] = _attend(q, k[begin:end], v[begin:end], scale, cap)


def _finish(grid: Any, kinds: list[str], logits: int, row_slot: int, arrays: SlotArrays, scratch: None, tokens: int,
            statuses: int, stride: int, chunks: int, first_token: int) -> None:  # fmt: skip
    rows = grid[0]
    token_row, status_row = array(tokens, I32, rows), array(statuses, I32, rows)
    for row, slot in enumerate(array(row_slot, I32, rows).tolist()):
        token_row[row], status_row[row] = -1, RowStatus.NO_TOKEN
        if slot < 0 or not (first_token or _slots(arrays, "active", I32, slot)[0]):
            continue
        raw = array(logits + row * stride * 4, F32, stride)[: arrays.vocab].copy()
        token, stops = _choose(raw, arrays, slot)
        active = _slots(arrays, "active", I32, slot)
        if token < 0:
            status_row[row], active[0] = RowStatus.FAULT, 0
            continue
        token_row[row], status_row[row] = token, RowStatus.STOPPED if stops else RowStatus.TOKEN
        active[0] = not stops
        _slots(arrays, "last_token", I32, slot)[0] = token
        _slots(arrays, "output_count", I32, slot)[0] += 1
        _slots(arrays, "position", I32, slot)[0] += 1


def _choose(raw: np.ndarray, arrays: SlotArrays, slot: int) -> tuple[int, bool]:
    how = _slots(arrays, "sampling", SAMPLING_DTYPE, slot)[0]
    n_output = int(_slots(arrays, "output_count", I32, slot)[0])
    stop_ids = array(arrays.stop_ids + slot * arrays.max_stop * 4, I32, int(how["n_stop"]))
    if not np.isfinite(np.max(raw)):
        return -1, False
    counts = array(arrays.counts + slot * arrays.vocab * 4, U32, arrays.vocab)
    if how["penalised"]:
        apply_penalties(
            raw, counts >> 31 == 1, (counts & 0x7FFFFFFF).astype(np.int32),
            repetition=float(how["repetition_penalty"]), presence=float(how["presence_penalty"]),
            frequency=float(how["frequency_penalty"]),
        )  # fmt: skip
    n_bias = int(how["n_bias"])
    ids = array(arrays.bias_ids + slot * arrays.max_bias * 4, I32, n_bias)
    raw[ids] += array(arrays.bias_values + slot * arrays.max_bias * 4, F32, n_bias)
    if n_output < how["min_tokens"]:
        raw[stop_ids] = -np.inf
    if not np.isfinite(np.max(raw)):
        return -1, False
    if how["temperature"] == 0:
        token = greedy(raw)
    else:
        token = sample(
            raw, temperature=float(how["temperature"]), top_k=int(how["top_k"]), top_p=float(how["top_p"]),
            min_p=float(how["min_p"]), uniform=uniform(int(how["seed"]), n_output),
        )  # fmt: skip
    if how["penalised"]:
        counts[token] += 1
    return token, token in stop_ids


def _logprobs(grid: Any, kinds: list[str], logits: int, targets: int, alternatives: int, row_slot: int,
              arrays: SlotArrays, parts: int, logprobs: int, ranks: int, top_ids: int, top_logprobs: int,
              stride: int, chunks: int) -> None:  # fmt: skip
    rows = grid[0]
    for row, target in enumerate(array(targets, I32, rows).tolist()):
        count = -1
        if target >= 0 and alternatives:
            count = int(array(alternatives, I32, rows)[row])
        elif target >= 0:
            slot = int(array(row_slot, I32, rows)[row])
            count = int(_slots(arrays, "sampling", SAMPLING_DTYPE, slot)[0]["logprobs"]) if slot >= 0 else -1
        rank = array(ranks, I32, rows)
        rank[row] = 0
        if count < 0:
            continue
        entry = token_logprobs(array(logits + row * stride * 4, F32, stride)[: arrays.vocab], target, count)
        rank[row] = entry.rank
        array(logprobs, F32, rows)[row] = entry.logprob
        ids, values = array(top_ids, I32, rows, 20)[row], array(top_logprobs, F32, rows, 20)[row]
        ids[:], values[:] = -1, -np.inf
        ids[:count], values[:count] = entry.top_ids, entry.top_logprobs


def _change(grid: Any, kinds: list[str], counts: int, changes: int, pages: int, arrays: SlotArrays,
            block_table: int, width: int) -> None:  # fmt: skip
    n_changes, n_pages = array(counts, I32, 2).tolist()
    for slot, position, active, _ in array(changes, I32, n_changes, 4).tolist():
        for name, value in (("position", position), ("active", active)):
            if value >= 0:
                _slots(arrays, name, I32, slot)[0] = value
    for slot, index, page, _ in array(pages, I32, n_pages, 4).tolist():
        array(block_table + 4 * (slot * width + index), I32, 1)[0] = page


def _start(grid: Any, kinds: list[str], starts: int, tokens: int, bias_ids: int, bias_values: int,
           arrays: SlotArrays) -> None:  # fmt: skip
    for start in array(starts, START_DTYPE, grid[0]):
        slot, how = int(start["slot"]), start["sampling"]
        _slots(arrays, "sampling", SAMPLING_DTYPE, slot)[0] = how
        for name, value in (
            ("position", 0),
            ("active", 0),
            ("last_token", -1),
            ("output_count", start["n_output"]),
        ):
            _slots(arrays, name, I32, slot)[0] = value
        n_stop, n_bias = int(how["n_stop"]), int(how["n_bias"])
        stops = array(tokens + 4 * int(start["first_stop"]), I32, n_stop)
        array(arrays.stop_ids + slot * arrays.max_stop * 4, I32, n_stop)[:] = stops
        first = 4 * int(start["first_bias"])
        array(arrays.bias_ids + slot * arrays.max_bias * 4, I32, n_bias)[:] = array(
            bias_ids + first, I32, n_bias
        )
        biases = array(arrays.bias_values + slot * arrays.max_bias * 4, F32, n_bias)
        biases[:] = array(bias_values + first, F32, n_bias)
        if how["penalised"]:
            counts = array(arrays.counts + slot * arrays.vocab * 4, U32, arrays.vocab)
            counts[:] = 0
            history = array(tokens + 4 * int(start["first_token"]), I32, int(start["n_tokens"]))
            n_prompt = len(history) - int(start["n_output"])
            counts[history[:n_prompt]] |= 0x80000000
            np.add.at(counts, history[n_prompt:], 1)


_TWINS: dict[str, tuple[str, Callable[..., None] | None]] = {
    "embed": ("pppppiif", _embed),
    "add_rms_norm": ("ppppppiff", _norm),
    "gated_activation": ("ppi", _gated),
    "skinny_product": ("ppppiiiff", _skinny),
    "rope_and_write": ("p" * 14 + "iiiiff", _rope),
    "plan_decode": ("ppppppiiii", _plan_decode),
    "attention_decode": ("p" * 9 + "iiiff", _decode),
    "merge_splits": ("ppppii", None),
    "attention_prefill": ("p" * 7 + "iiiiff", _prefill),
    "sample_scan": ("", None),
    "sample_weigh": ("", None),
    "sample_cut": ("", None),
    "sample_collect": ("", None),
    "sample_finish": ("ppSxppiii", _finish),
    "logprob_chunks": ("", None),
    "logprob_rows": ("ppppSpppppii", _logprobs),
    "change_slots": ("pppSpi", _change),
    "start_slots": ("ppppS", _start),
}
"""Kinds of arguments (pointer, int32, float, slot arrays, x: not looked at) and the twin, by kernel."""
