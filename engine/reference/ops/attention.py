"""Causal attention over KV pages, for ragged segments. Knows no slot and no layer.

A query row's result has the same bits whatever chunk or batch it is computed in. Scores are taken page
by page; the maximum over all pages is exact in any order; weights are summed over the pages in order,
for each place in a page, and then over the places; weighted values are summed inside each page and then
over the pages in order. Pages that a row may not see add exact zeros. The products with a page run at a
proved number of columns (see row_widths).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from engine.interface import PAGE_SIZE
from engine.reference.arrays import FloatArray, IntArray

MAX_COLUMNS = 256
"""Query rows times heads of a group in one tile."""
_MAX_TILE_SCORES = 8 * 1024 * 1024
"""Scores of one tile, in numbers: 32 MB. Longer contexts take fewer query rows at a time."""
_BATCHED_VALUES = 64 * 1024
"""Up to so many partial values, one batched product beats a loop over pages that stays in cache."""


def attention_decode(
    query: FloatArray,
    k_pages: FloatArray,
    v_pages: FloatArray,
    block_tables: IntArray,
    positions: IntArray,
    *,
    scale: float,
    window: int | None = None,
    columns: Callable[[int], int] = int,
) -> FloatArray:
    """One query row per sequence: attention_prefill with segments of one row."""
    offsets = np.arange(len(positions) + 1, dtype=np.int32)
    return attention_prefill(
        query,
        k_pages,
        v_pages,
        block_tables,
        offsets,
        positions,
        scale=scale,
        window=window,
        columns=columns,
    )


def attention_prefill(
    query: FloatArray,
    k_pages: FloatArray,
    v_pages: FloatArray,
    block_tables: IntArray,
    segment_offsets: IntArray,
    start_positions: IntArray,
    *,
    scale: float,
    window: int | None = None,
    columns: Callable[[int], int] = int,
) -> FloatArray:
    """softmax(scale · q·k) · v for ragged segments of query rows.

    query            float32 [rows, n_heads, head_dim], rotated; KV of these rows is already in the pages
    k_pages, v_pages float32 [pages, n_kv_heads, PAGE_SIZE, head_dim]
    block_tables     int32 [segments, table entries]: entry i is the page of positions 64·i … 64·i + 63
    segment_offsets  int32 [segments + 1]: rows of segment s are segment_offsets[s] … [s + 1] − 1
    start_positions  int32 [segments]: position of each segment's first row
    window           a row at position i sees i − window + 1 … i; None: 0 … i
    columns          rounds a tile's width up to one that BLAS treats alike

    Query head h reads kv head h // (n_heads // n_kv_heads). Returns float32 [rows, n_heads, head_dim];
    rows after the last segment's are zero.
    """
    n_kv_heads = k_pages.shape[1]
    rows, n_heads, head_dim = query.shape
    group = n_heads // n_kv_heads
    out = np.empty((rows, n_heads, head_dim), np.float32)
    out[segment_offsets[-1] :] = 0
    grouped = (rows, n_kv_heads, group, head_dim)
    query_groups, out_groups = query.reshape(grouped), out.reshape(grouped)
    for segment, position in enumerate(start_positions.tolist()):
        row, end = segment_offsets[segment : segment + 2].tolist()
        while row < end:
            first_page = 0 if window is None else max(0, position - window + 1) // PAGE_SIZE
            count = min(end - row, _tile_rows(position, first_page, n_kv_heads, group))
            pages = block_tables[segment, first_page : (position + count - 1) // PAGE_SIZE + 1]
            tile = _load_query(query_groups[row : row + count], scale, columns)
            scores = _scores(tile, k_pages, pages)
            _mask(scores, first_page * PAGE_SIZE, position, count, group, window)
            _store(_weigh(scores, v_pages, pages), out_groups[row : row + count])
            row += count
            position += count
    return out


def _tile_rows(position: int, first_page: int, n_kv_heads: int, group: int) -> int:
    """Query rows for the next tile, at least one."""
    keys = position + MAX_COLUMNS - first_page * PAGE_SIZE
    columns = min(MAX_COLUMNS, _MAX_TILE_SCORES // (keys * n_kv_heads))
    return max(1, columns // group)


def _load_query(query: FloatArray, scale: float, columns: Callable[[int], int]) -> FloatArray:
    """[rows, kv heads, group, head_dim] to scaled columns [kv heads, head_dim, group · rows, padded].

    Padding columns are zero queries: they score zero everywhere and are dropped by _store.
    """
    rows, n_kv_heads, group, head_dim = query.shape
    width = group * rows
    tile = np.zeros((n_kv_heads, head_dim, columns(width)), np.float32)
    used = tile[:, :, :width].reshape(n_kv_heads, head_dim, group, rows)
    np.multiply(query.transpose(1, 3, 2, 0), np.float32(scale), out=used)
    return tile


def _runs(pages: IntArray) -> Iterator[tuple[int, int, int]]:
    """Stretches of consecutive page numbers: (index of the first, its number, count).

    A stretch is used in place, as a view; sequences that were alone when they grew have one.
    """
    numbers = pages.tolist()
    start = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield start, numbers[start], index - start
            start = index


def _scores(tile: FloatArray, k_pages: FloatArray, pages: IntArray) -> FloatArray:
    """k · q for all keys of the pages: float32 [pages, kv heads, PAGE_SIZE, columns]."""
    scores = np.empty((len(pages), k_pages.shape[1], PAGE_SIZE, tile.shape[2]), np.float32)
    for index, number, count in _runs(pages):
        np.matmul(k_pages[number : number + count], tile, out=scores[index : index + count])
    return scores


def _mask(
    scores: FloatArray, key_position: int, position: int, rows: int, group: int, window: int | None
) -> None:
    """Sets to −inf what a row may not see. Only pages on the diagonal or on the window's edge are touched."""
    width = group * rows
    positions = np.arange(position, position + rows)
    for index in range(len(scores)):
        first_key = key_position + index * PAGE_SIZE
        after = first_key + PAGE_SIZE - 1 > position
        before = window is not None and first_key <= position + rows - 1 - window
        if not after and not before:
            continue
        keys = np.arange(first_key, first_key + PAGE_SIZE)[:, None]
        hidden = keys > positions
        if window is not None:
            hidden |= keys <= positions - window
        scores[index, :, :, :width][:, np.tile(hidden, (1, group))] = -np.inf


def _weigh(scores: FloatArray, v_pages: FloatArray, pages: IntArray) -> FloatArray:
    """softmax over all keys, times the values: float32 [kv heads, columns, head_dim]. Spoils scores."""
    peak = np.maximum.reduce(np.maximum.reduce(scores, axis=0), axis=1, keepdims=True)
    scores -= peak
    weights = np.exp(scores, out=scores)
    total = np.add.reduce(np.add.reduce(weights, axis=0), axis=1)
    n_kv_heads, columns, head_dim = v_pages.shape[1], scores.shape[3], v_pages.shape[3]
    transposed = weights.swapaxes(2, 3)
    if len(pages) * n_kv_heads * columns * head_dim <= _BATCHED_VALUES:
        partial = np.empty((len(pages), n_kv_heads, columns, head_dim), np.float32)
        for index, number, count in _runs(pages):
            np.matmul(
                transposed[index : index + count],
                v_pages[number : number + count],
                out=partial[index : index + count],
            )
        values: FloatArray = np.add.reduce(partial, axis=0)
    else:
        numbers = pages.tolist()
        values = np.matmul(transposed[0], v_pages[numbers[0]])
        page_values = np.empty_like(values)
        for index, number in enumerate(numbers[1:], start=1):
            values += np.matmul(transposed[index], v_pages[number], out=page_values)
    values /= total[:, :, None]
    return values


def _store(values: FloatArray, out: FloatArray) -> None:
    """[kv heads, group · rows, padded, head_dim] into out [rows, kv heads, group, head_dim]."""
    rows, n_kv_heads, group, head_dim = out.shape
    used = values[:, : group * rows].reshape(n_kv_heads, group, rows, head_dim)
    out[...] = used.transpose(2, 0, 1, 3)
