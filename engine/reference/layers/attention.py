"""Softmax attention as a mixer: projections, head norms, rotation, KV pages, output gate. Knows no slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from engine.config import AttentionSpec, RopeSpec
from engine.interface import PAGE_SIZE
from engine.options import KvDtype
from engine.reference.arrays import FloatArray, IntArray
from engine.reference.batch import RaggedBatch
from engine.reference.ops.activation import sigmoid
from engine.reference.ops.attention import attention_prefill
from engine.reference.ops.kv_pages import scrub_pages, write_fp8_pages, write_kv_pages
from engine.reference.ops.moe import round_bfloat16
from engine.reference.ops.norm import rms_norm
from engine.reference.ops.rope import rope
from engine.reference.weights import Linear, WeightReader

Ropes = Mapping[RopeSpec, tuple[FloatArray, FloatArray]]
"""cos and sin of a pass's rows, float32 [padded rows, rotary_dim / 2], by table."""


class AttentionMixer:
    """One layer's attention with its weights and its KV pages."""

    def __init__(
        self,
        spec: AttentionSpec,
        reader: WeightReader,
        pages: int,
        columns: Callable[[int], int],
        kv_dtype: KvDtype = KvDtype.AUTO,
    ) -> None:
        """`columns` rounds the width of an attention tile up to a proved one."""
        self._spec = spec
        self._columns = columns
        self._qkv = _read_projections(spec, reader)
        self._out = reader.linear("o", bias=spec.output_bias)
        self._head_norms = _read_head_norms(spec, reader)
        shape = (pages, spec.n_kv_heads, PAGE_SIZE, spec.head_dim)
        self.k_pages: FloatArray = np.zeros(shape, np.float32)
        self.v_pages: FloatArray = np.zeros(shape, np.float32)
        self._kv_dtype = kv_dtype
        self._k_scales, self._v_scales = np.ones((2, *shape[:2]), np.float32)
        """Of fp8 pages."""

    def linears(self) -> list[Linear]:
        return [self._qkv, self._out]

    def __call__(self, hidden: FloatArray, batch: RaggedBatch, ropes: Ropes) -> FloatArray:
        """float32 [padded rows, hidden] to the same; writes KV of the batch's rows."""
        spec, rows = self._spec, batch.padded_rows
        projected = self._qkv(hidden)
        qk_dim = spec.q_dim + spec.kv_dim
        heads = projected[:, :qk_dim].reshape(rows, spec.n_heads + spec.n_kv_heads, spec.head_dim)
        values = self._values(projected)
        if spec.qk_norm is not None:
            heads = rms_norm(heads, self._head_norms, spec.qk_norm.eps)
        if spec.rope is not None:
            rope(heads, *ropes[spec.rope])
        query, key = heads[:, : spec.n_heads], heads[:, spec.n_heads :]
        self._write(key[: batch.rows], values[: batch.rows], batch)
        attended = attention_prefill(
            query,
            self.k_pages,
            self.v_pages,
            batch.block_tables,
            batch.offsets,
            batch.starts,
            scale=spec.scale,
            window=spec.window,
            columns=self._columns,
        ).reshape(rows, spec.q_dim)
        if spec.output_gate:
            attended *= sigmoid(projected[:, -spec.q_dim :])
        return self._out(attended)

    def forget(self, slot: int) -> None:
        """Nothing stays outside the pages."""

    def scrub(self, slot: int, pages: IntArray) -> None:
        """Rids a failed sequence's pages of what is not finite."""
        scrub_pages(self.k_pages, pages)
        scrub_pages(self.v_pages, pages)

    def _write(self, key: FloatArray, values: FloatArray, batch: RaggedBatch) -> None:
        """Keys and values [rows, n_kv_heads, head_dim] into the pages, rounded as they are cached."""
        places = batch.row_pages, batch.row_offsets
        if self._kv_dtype is KvDtype.FP8:
            write_fp8_pages(key, self.k_pages, self._k_scales, *places)
            write_fp8_pages(values, self.v_pages, self._v_scales, *places)
            return
        if self._kv_dtype is KvDtype.BF16:
            key, values = round_bfloat16(key), round_bfloat16(values)
        write_kv_pages(key, values, self.k_pages, self.v_pages, *places)

    def _values(self, projected: FloatArray) -> FloatArray:
        """v of [rows, projections]: [rows, n_kv_heads, head_dim]; a copy if k is changed later."""
        spec = self._spec
        first = spec.q_dim + (0 if spec.v_from_k else spec.kv_dim)
        shape = (len(projected), spec.n_kv_heads, spec.head_dim)
        values = projected[:, first : first + spec.kv_dim].reshape(shape)
        if spec.v_norm_eps is not None:
            return rms_norm(values, None, spec.v_norm_eps)
        return values.copy() if spec.v_from_k else values


def _read_projections(spec: AttentionSpec, reader: WeightReader) -> Linear:
    """q | k | v | gate as one product; without a v projection or a gate, without that part."""
    names = ("q", "k") if spec.v_from_k else ("q", "k", "v")
    parts = [reader.matrix(f"{name}.weight") for name in names]
    biases = reader.biases(*names) if spec.qkv_bias else None
    if spec.output_gate:
        parts = _gate_last(spec, parts)
        biases = None if biases is None else _gate_last(spec, biases)
    return reader.joined(parts, biases)


def _gate_last(spec: AttentionSpec, parts: list[FloatArray]) -> list[FloatArray]:
    """Splits the first part's rows, per head a query then a gate, and puts the gates at the end."""
    paired = parts[0].reshape(spec.n_heads, 2, spec.head_dim, *parts[0].shape[1:])
    query, gate = (paired[:, i].reshape(spec.q_dim, *parts[0].shape[1:]) for i in (0, 1))
    return [query, *parts[1:], gate]


def _read_head_norms(spec: AttentionSpec, reader: WeightReader) -> FloatArray | None:
    """Weights [n_heads + n_kv_heads, head_dim] that norm all heads of q and k at once."""
    if spec.qk_norm is None:
        return None
    q_norm, k_norm = reader.norm("q_norm", spec.qk_norm), reader.norm("k_norm", spec.qk_norm)
    return np.concatenate([np.tile(q_norm, (spec.n_heads, 1)), np.tile(k_norm, (spec.n_kv_heads, 1))])
