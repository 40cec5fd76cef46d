"""Token embedding. Knows no model."""

from __future__ import annotations

import numpy as np

from engine.reference.arrays import FloatArray, IntArray


def embed(tokens: IntArray, table: FloatArray, scale: float = 1.0) -> FloatArray:
    """Rows of `table` [vocab, hidden] for tokens int32 [rows], times `scale`: float32 [rows, hidden]."""
    hidden: FloatArray = np.take(table, tokens, axis=0)
    if scale != 1.0:
        hidden *= np.float32(scale)
    return hidden
