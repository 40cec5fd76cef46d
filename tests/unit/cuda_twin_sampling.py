"""Numpy twins of the kernels that sample and change slots. Arguments are those of the launch; addresses are
host memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference.ops.logprobs import token_logprobs
from engine.reference.ops.philox import uniform
from engine.reference.ops.sampling import apply_penalties, greedy, sample
from kernels.sampling import RowStatus
from kernels.slots import SAMPLING_DTYPE, START_DTYPE, SlotArrays
from tests.unit.cuda_twin_memory import F32, I32, U32, array, slot_entry


def finish(
    grid: Any,
    kinds: list[str],
    logits: int,
    row_slot: int,
    arrays: SlotArrays,
    scratch: None,
    tokens: int,
    statuses: int,
    stride: int,
    chunks: int,
    first_token: int,
) -> None:
    rows = grid[0]
    token_row, status_row = array(tokens, I32, rows), array(statuses, I32, rows)
    for row, slot in enumerate(array(row_slot, I32, rows).tolist()):
        token_row[row], status_row[row] = -1, RowStatus.NO_TOKEN
        if slot < 0 or not (first_token or slot_entry(arrays, "active", I32, slot)[0]):
            continue
        raw = array(logits + row * stride * 4, F32, stride)[: arrays.vocab].copy()
        token, stops = choose(raw, arrays, slot)
        active = slot_entry(arrays, "active", I32, slot)
        if token < 0:
            status_row[row], active[0] = RowStatus.FAULT, 0
            continue
        token_row[row], status_row[row] = token, RowStatus.STOPPED if stops else RowStatus.TOKEN
        active[0] = not stops
        slot_entry(arrays, "last_token", I32, slot)[0] = token
        slot_entry(arrays, "output_count", I32, slot)[0] += 1
        slot_entry(arrays, "position", I32, slot)[0] += 1


def choose(raw: np.ndarray, arrays: SlotArrays, slot: int) -> tuple[int, bool]:
    how = slot_entry(arrays, "sampling", SAMPLING_DTYPE, slot)[0]
    n_output = int(slot_entry(arrays, "output_count", I32, slot)[0])
    stop_ids = array(arrays.stop_ids + slot * arrays.max_stop * 4, I32, int(how["n_stop"]))
    if not np.isfinite(np.max(raw)):
        return -1, False
    counts = array(arrays.counts + slot * arrays.vocab * 4, U32, arrays.vocab)
    if how["penalised"]:
        apply_penalties(
            raw,
            counts >> 31 == 1,
            (counts & 0x7FFFFFFF).astype(np.int32),
            repetition=float(how["repetition_penalty"]),
            presence=float(how["presence_penalty"]),
            frequency=float(how["frequency_penalty"]),
        )
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
            raw,
            temperature=float(how["temperature"]),
            top_k=int(how["top_k"]),
            top_p=float(how["top_p"]),
            min_p=float(how["min_p"]),
            uniform=uniform(int(how["seed"]), n_output),
        )
    if how["penalised"]:
        counts[token] += 1
    return token, token in stop_ids


def logprobs(
    grid: Any,
    kinds: list[str],
    logits: int,
    targets: int,
    alternatives: int,
    row_slot: int,
    arrays: SlotArrays,
    parts: int,
    logprobs: int,
    ranks: int,
    top_ids: int,
    top_logprobs: int,
    stride: int,
    chunks: int,
) -> None:
    rows = grid[0]
    for row, target in enumerate(array(targets, I32, rows).tolist()):
        count = -1
        if target >= 0 and alternatives:
            count = int(array(alternatives, I32, rows)[row])
        elif target >= 0:
            slot = int(array(row_slot, I32, rows)[row])
            count = (
                int(slot_entry(arrays, "sampling", SAMPLING_DTYPE, slot)[0]["logprobs"]) if slot >= 0 else -1
            )
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


def change(
    grid: Any,
    kinds: list[str],
    counts: int,
    changes: int,
    pages: int,
    arrays: SlotArrays,
    block_table: int,
    width: int,
) -> None:
    n_changes, n_pages = array(counts, I32, 2).tolist()
    for slot, position, active, _ in array(changes, I32, n_changes, 4).tolist():
        for name, value in (("position", position), ("active", active)):
            if value >= 0:
                slot_entry(arrays, name, I32, slot)[0] = value
    for slot, index, page, _ in array(pages, I32, n_pages, 4).tolist():
        array(block_table + 4 * (slot * width + index), I32, 1)[0] = page


def start(
    grid: Any, kinds: list[str], starts: int, tokens: int, bias_ids: int, bias_values: int, arrays: SlotArrays
) -> None:
    for start in array(starts, START_DTYPE, grid[0]):
        slot, how = int(start["slot"]), start["sampling"]
        slot_entry(arrays, "sampling", SAMPLING_DTYPE, slot)[0] = how
        for name, value in (
            ("position", 0),
            ("active", 0),
            ("last_token", -1),
            ("output_count", start["n_output"]),
        ):
            slot_entry(arrays, name, I32, slot)[0] = value
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
