"""Writing and cleaning KV pages [pages, kv heads, PAGE_SIZE, head_dim]. Knows no slot and no layer."""

from __future__ import annotations

import numpy as np

from engine.quantization.fp8 import from_e4m3, to_e4m3
from engine.reference.arrays import FloatArray, IntArray

_LEAST_EXPONENT = -32
"""Of a scale: keys and values of less than 1e-10 may as well be zero."""


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


def write_fp8_pages(
    values: FloatArray, pages: FloatArray, scales: FloatArray, row_pages: IntArray, row_offsets: IntArray
) -> None:
    """As write_kv_pages, of keys or of values alone, rounded as a cache of e4m3 holds them.

    pages   float32 [pages, kv heads, PAGE_SIZE, head_dim]: scale · e4m3, exactly
    scales  float32 [pages, kv heads], powers of two. The write of a page's first place sets the smallest
            with amax ≤ 448 · scale; a later write may raise it, and then what the page holds is rounded anew
    """
    for page in np.unique(row_pages).tolist():
        rows = np.flatnonzero(row_pages == page)
        needed = power_of_two_scales(np.fmax.reduce(np.abs(values[rows]), axis=(0, 2)))
        held = pages[page]
        if (row_offsets[rows] == 0).any():
            held[...] = 0
        else:
            needed = np.maximum(needed, scales[page])
        held[:, row_offsets[rows]] = values[rows].swapaxes(0, 1)
        scales[page] = needed
        by_head = needed[:, None, None]
        held[...] = from_e4m3(to_e4m3(held / by_head)) * by_head


def power_of_two_scales(magnitudes: FloatArray) -> FloatArray:
    """The smallest powers of two, from 2⁻³² on, with magnitude ≤ 448 · scale; 448 = 0.875 · 2⁹."""
    fractions, exponents = np.frexp(magnitudes)
    exponents = np.maximum(np.where(fractions > 0.875, exponents - 8, exponents - 9), _LEAST_EXPONENT)
    exponents[fractions == 0] = _LEAST_EXPONENT
    return np.ldexp(np.float32(1), exponents).astype(np.float32)


def scrub_pages(pages: FloatArray, numbers: IntArray) -> None:
    """Replaces what is not finite in the given pages by zero.

    Attention multiplies the unwritten tail of a page by a weight of zero, and zero times NaN is NaN:
    a sequence that failed must not leave such values to the page's next owner.
    """
    chosen = pages[numbers]
    pages[numbers] = np.nan_to_num(chosen, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
