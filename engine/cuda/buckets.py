"""Sizes that programs are made for, so that a handful of graphs serves all steps. Knows no model.

A step runs in the smallest bucket that holds it; the rest of the bucket is padding that touches no sequence.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

MOST_WIDTH = 1024
"""Decode rows of one step at most; also what one block of plan_decode lists."""

_DECODE_STEPS = ((8, 8), (64, 8), (128, 16), (256, 32), (512, 64), (MOST_WIDTH, 128))
"""(up to, in steps of) beyond the powers of two up to 8: at most an eighth of a wide step is padding."""
_PREFILL_STEPS = ((64, 16), (256, 64), (1024, 128), (2048, 256), (4096, 512), (8192, 1024), (1 << 20, 4096))


def decode_widths(slots: int) -> tuple[int, ...]:
    """Numbers of decode rows, ascending; the last holds all slots. Raises ValueError beyond MOST_WIDTH."""
    if not 1 <= slots <= MOST_WIDTH:
        raise ValueError(f"{slots} sequences are not in 1 … {MOST_WIDTH}")
    return _up_to(slots, (1, 2, 4, *_stepped(4, _DECODE_STEPS)))


def prefill_sizes(most_tokens: int) -> tuple[int, ...]:
    """Numbers of prompt tokens, ascending; the last holds most_tokens."""
    return _up_to(most_tokens, _stepped(0, _PREFILL_STEPS))


def pick(buckets: Sequence[int], count: int) -> int:
    """The smallest bucket that holds `count`. Raises ValueError if none does."""
    index = bisect_left(buckets, count)
    if index == len(buckets):
        raise ValueError(f"{count} rows exceed the largest bucket, {buckets[-1]}")
    return buckets[index]


def _stepped(start: int, steps: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    sizes = []
    for end, step in steps:
        first = start // step * step + step
        sizes += list(range(first, end + 1, step))
        start = end
    return tuple(sizes)


def _up_to(most: int, sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sizes[: bisect_left(sizes, most) + 1])
