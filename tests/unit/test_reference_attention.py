"""Paged attention against a float64 softmax over gathered keys, and against itself in other chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from engine.interface import PAGE_SIZE
from engine.reference.ops import attention
from engine.reference.ops.attention import attention_decode, attention_prefill
from engine.reference.row_widths import COLUMN_CANDIDATES, page_product, prove


@dataclass
class Cache:
    """KV of several sequences on pages in random order; pages of nobody hold NaN."""

    k: np.ndarray
    v: np.ndarray
    tables: np.ndarray
    columns: Callable[[int], int]

    @classmethod
    def make(
        cls, sequences: int, length: int, kv_heads: int, head_dim: int, *, shuffled: bool = True
    ) -> Cache:
        random = np.random.default_rng(length * head_dim + kv_heads)
        entries = -(-length // PAGE_SIZE)
        numbers = np.arange(sequences * entries + 3)
        if shuffled:
            numbers = random.permutation(numbers)
        k, v = np.full((2, len(numbers), kv_heads, PAGE_SIZE, head_dim), np.nan, np.float32)
        tables = numbers[: sequences * entries].reshape(sequences, entries).astype(np.int32)
        for pages in (k, v):
            pages[tables] = random.standard_normal((*tables.shape, *pages.shape[1:]))
        return cls(k, v, tables, prove([page_product(head_dim)], COLUMN_CANDIDATES).pad)

    def run(self, query: np.ndarray, starts: list[int], lengths: list[int], **options: Any) -> np.ndarray:
        offsets = np.cumsum([0, *lengths]).astype(np.int32)
        return attention_prefill(
            query,
            self.k,
            self.v,
            self.tables[: len(starts)],
            offsets,
            np.array(starts, np.int32),
            columns=self.columns,
            **options,
        )

    def exact(
        self,
        query: np.ndarray,
        sequence: int,
        start: int,
        *,
        scale: float,
        window: int | None = None,
    ) -> np.ndarray:
        """The same for one segment, row by row in float64."""
        rows, heads, _ = query.shape
        group = heads // self.k.shape[1]
        out = np.empty(query.shape)
        for row in range(rows):
            position = start + row
            first = 0 if window is None else max(0, position - window + 1)
            where = np.arange(first, position + 1)
            page, place = self.tables[sequence, where // PAGE_SIZE], where % PAGE_SIZE
            for head in range(heads):
                keys = self.k[page, head // group, place].astype(np.float64)
                scores = scale * (keys @ query[row, head].astype(np.float64))
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ self.v[page, head // group, place] / weights.sum()
        return out


def queries(rows: int, heads: int, head_dim: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, heads, head_dim), dtype=np.float32)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(1, 1, 32), (9, 3, 64), (7, 1, 64), (8, 1, 128), (4, 4, 16), (2, 1, 256)],
)
@pytest.mark.parametrize("window", [None, 1, 16, 63, 64, 65, 200, 10_000])
def test_ragged_segments(heads: int, kv_heads: int, head_dim: int, window: int | None) -> None:
    cache = Cache.make(3, 260, kv_heads, head_dim)
    starts, lengths = [0, 130, 199], [70, 3, 1]
    query = queries(sum(lengths) + 5, heads, head_dim)
    out = cache.run(query, starts, lengths, scale=head_dim**-0.5, window=window)
    row = 0
    for sequence, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        wanted = cache.exact(query[row : row + length], sequence, start, scale=head_dim**-0.5, window=window)
        np.testing.assert_allclose(out[row : row + length], wanted, atol=5e-6, err_msg=f"segment {sequence}")
        row += length
    assert not out[row:].any(), "padding rows are zero"


def test_scores_far_beyond_the_range_of_exp() -> None:
    cache = Cache.make(1, 70, 1, 32)
    query = 1000 * queries(70, 2, 32)
    out = cache.run(query, [0], [70], scale=1.0)
    np.testing.assert_allclose(out, cache.exact(query, 0, 0, scale=1.0), atol=1e-3)


@pytest.mark.parametrize("window", [None, 40, 64])
@pytest.mark.parametrize("length", [63, 64, 65, 300])
def test_chunks_and_batch_change_no_bit(window: int | None, length: int) -> None:
    cache = Cache.make(2, length, 3, 64)
    query = queries(length, 9, 64)
    whole = cache.run(query, [0], [length], scale=0.125, window=window)
    for cut in {1, 7, 62, length // 2, length - 1}:
        parts = [
            cache.run(query[:cut], [0], [cut], scale=0.125, window=window),
            cache.run(query[cut:], [cut], [length - cut], scale=0.125, window=window),
        ]
        assert np.array_equal(np.concatenate(parts), whole), f"cut at {cut}"
    positions = np.array([length - 1, 3], np.int32)
    rows = attention_decode(
        query[positions],
        cache.k,
        cache.v,
        cache.tables[[0, 0]],
        positions,
        scale=0.125,
        window=window,
        columns=cache.columns,
    )
    assert np.array_equal(rows, whole[positions])


def test_page_order_and_tile_size_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    length, query = 500, queries(500, 6, 32)
    straight = Cache.make(1, length, 2, 32, shuffled=False)
    whole = straight.run(query, [0], [length], scale=0.2)
    order = np.random.default_rng(1).permutation(len(straight.k))
    mixed = Cache(straight.k[order], straight.v[order], np.argsort(order)[straight.tables], straight.columns)
    assert np.array_equal(mixed.run(query, [0], [length], scale=0.2), whole)
    monkeypatch.setattr(attention, "_MAX_TILE_SCORES", 20_000)
    assert np.array_equal(straight.run(query, [0], [length], scale=0.2), whole)
    monkeypatch.setattr(attention, "_BATCHED_VALUES", 0)
    assert np.array_equal(straight.run(query, [0], [length], scale=0.2), whole)


def test_unwritten_places_do_not_matter() -> None:
    cache = Cache.make(1, 70, 1, 32)
    query = queries(1, 2, 32)
    before = cache.run(query, [65], [1], scale=0.2)
    cache.k[cache.tables[0, 1], :, 2:] = 1e30
    cache.v[cache.tables[0, 1], :, 2:] = -1e30
    assert np.array_equal(cache.run(query, [65], [1], scale=0.2), before)
