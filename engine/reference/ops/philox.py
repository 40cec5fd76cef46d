"""Philox4x32-10, the counter-based generator behind every draw (Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3", 2011). Knows no token.
"""

from __future__ import annotations

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words for a 128-bit counter and a 64-bit key, both least significant word first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & _MASK, (first >> 32) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, index: int) -> float:
    """The draw of output token `index` under `seed` (both unsigned 64-bit): in (0, 1), exact in float64.

    (w + ½) / 2³² with w the first word of philox4x32(counter = (index, 0), key = seed).
    """
    counter = (index & _MASK, (index >> 32) & _MASK, 0, 0)
    word = philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))[0]
    return (word + 0.5) / 2.0**32
