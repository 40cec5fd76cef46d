"""Routing of rows to experts. Knows no weights."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine.reference.arrays import FloatArray, IntArray


def round_bfloat16(x: FloatArray) -> FloatArray:
    """x rounded to the nearest bf16, as float32."""
    rounded: FloatArray = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    return rounded


def route_top_k(router_logits: FloatArray, top_k: int, *, normalise: bool) -> tuple[IntArray, FloatArray]:
    """Experts int32 [rows, top_k] and their weights float32 [rows, top_k] for logits [rows, experts].

    Softmax over all experts, then the top_k most likely, ties by lower id; `normalise` divides their
    probabilities by their sum.
    """
    shifted = router_logits - np.max(router_logits, axis=-1, keepdims=True)
    probabilities: FloatArray = np.exp(shifted)
    probabilities /= np.add.reduce(probabilities, axis=-1, keepdims=True)
    experts = np.argsort(-probabilities, axis=-1, kind="stable")[:, :top_k]
    weights: FloatArray = np.take_along_axis(probabilities, experts, axis=-1)
    if normalise:
        weights /= np.add.reduce(weights, axis=-1, keepdims=True)
    return experts.astype(np.int32), weights


def rows_by_expert(experts: IntArray) -> Iterator[tuple[int, NDArray[np.intp], NDArray[np.intp]]]:
    """(expert, its rows, their places among the row's top_k), experts ascending, only those with rows."""
    top_k = experts.shape[1]
    flat = experts.ravel()
    order = np.argsort(flat, kind="stable")
    chosen, firsts = np.unique(flat[order], return_index=True)
    for expert, pairs in zip(chosen.tolist(), np.split(order, firsts[1:]), strict=True):
        yield expert, pairs // top_k, pairs % top_k
