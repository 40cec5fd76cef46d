"""Writing and cleaning KV pages [pages, kv heads, PAGE_SIZE, head_dim]. Knows no slot and no layer."""

from __future__ import annotations

import numpy as np

from engine.reference.arrays import FloatArray, IntArray


def write_kv_pages(
    k: FloatArray,
    v: FloatArray,
    k_pages: FloatArray,
    v_pages: FloatArray,
    row_pages: IntArray,
    row_offsets: IntArray,
) -> None:
    """Puts row r of k and v [rows, kv heads, head_dim] at place row_offsets[r] of page row_pages[r].

    Both index arrays are int32 [rows]; a (page, place) pair occurs once.
    """
    k_pages[row_pages, :, row_offsets] = k
    v_pages[row_pages, :, row_offsets] = v


def scrub_pages(pages: FloatArray, numbers: IntArray) -> None:
    """Replaces what is not finite in the given pages by zero.

    Attention multiplies the unwritten tail of a page by a weight of zero, and zero times NaN is NaN:
    a sequence that failed must not leave such values to the page's next owner.
    """
    chosen = pages[numbers]
    pages[numbers] = np.nan_to_num(chosen, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
