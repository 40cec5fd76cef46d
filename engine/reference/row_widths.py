"""Which numbers of rows BLAS treats alike: the ground on which equal bits in any batch stand.

A GEMM routine may take another path, with other rounding, for few rows (a matrix-vector product, a
small-matrix kernel, the remainder of a register tile). So rows are padded to widths from a short list,
and which widths belong to it is proved at load on the very shapes the model has: a width is kept where
every row comes out with the same bits as in the widest product. Knows no model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from engine.interface import PAGE_SIZE
from engine.reference.arrays import FloatArray
from engine.reference.ops.attention import MAX_COLUMNS
from engine.reference.ops.linear import BLOCK_ROWS, linear

ROW_CANDIDATES = (8, 16, 24, 32, 48, 64, 96, 128, 192, BLOCK_ROWS)
"""Rows of a GEMM block. Fewer than 8 save nothing: OpenBLAS then spends its time packing the weight."""
COLUMN_CANDIDATES = (16, 32, 48, 64, 96, 128, 192, MAX_COLUMNS)
"""Columns of an attention tile."""

Product = Callable[[FloatArray], FloatArray]
"""Rows in, rows out, one result row per input row."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Proved widths."""

    sizes: tuple[int, ...]
    """Ascending; the last is the width of a full block."""
    position_free: bool = True
    """Whether a row's bits are the same at every place in a block. False leaves no guarantee."""

    def pad(self, count: int) -> int:
        """Rows to run for `count` ≥ 1 rows: whole blocks, then the least width that holds the rest."""
        whole, rest = divmod(count, self.sizes[-1])
        return whole * self.sizes[-1] + (self.sizes[bisect_left(self.sizes, rest)] if rest else 0)


def prove(products: Iterable[tuple[int, Product]], candidates: tuple[int, ...]) -> Widths:
    """Widths on which all products agree with their widest; each comes with its input's length."""
    agreed = set(candidates)
    position_free = True
    random = np.random.default_rng(0)
    for length, product in products:
        rows = random.standard_normal((candidates[-1], length), dtype=np.float32)
        widest = product(rows)
        position_free &= np.array_equal(product(np.ascontiguousarray(rows[::-1]))[::-1], widest)
        agreed = {
            width for width in agreed if np.array_equal(product(rows[:width].copy()), widest[:width])
        } | {candidates[-1]}
    return Widths(tuple(sorted(agreed)), position_free)


def weight_product(weight: FloatArray) -> tuple[int, Product]:
    """The product of ops.linear with a weight [n, k]."""
    return weight.shape[1], lambda rows: linear(rows, weight)


def page_product(head_dim: int) -> tuple[int, Product]:
    """Both products of ops.attention with one page of one kv head, one after the other."""
    random = np.random.default_rng(1)
    keys, values = random.standard_normal((2, PAGE_SIZE, head_dim), dtype=np.float32)

    def product(rows: FloatArray) -> FloatArray:
        scores = np.matmul(keys, np.ascontiguousarray(rows.T))
        return np.hstack([scores.T, np.matmul(scores.T, values)])

    return head_dim, product
