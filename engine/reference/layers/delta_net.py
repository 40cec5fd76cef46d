"""Gated DeltaNet as a mixer: projections, convolution, recurrence, gated norm, and the state of all slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.config import Activation, DeltaNetSpec
from engine.reference.arrays import FloatArray, IntArray
from engine.reference.batch import RaggedBatch
from engine.reference.layers.attention import Ropes
from engine.reference.ops.activation import gelu_tanh, sigmoid, silu
from engine.reference.ops.delta_net import CHUNK, causal_conv, decay_log, delta_chunk, delta_step
from engine.reference.ops.norm import gated_rms_norm, l2_norm
from engine.reference.weights import Linear, WeightReader

_ACTIVATIONS = {Activation.SILU: silu, Activation.GELU_TANH: gelu_tanh}


class DeltaNetMixer:
    """One layer's DeltaNet with its weights and, for every slot, its recurrent state.

    Chunks are cut at multiples of CHUNK in the sequence, so a prompt that is split there gives the same
    bits as one that is not; split elsewhere, it agrees as closely as the two forms of the recurrence do.
    """

    def __init__(self, spec: DeltaNetSpec, reader: WeightReader, slots: int) -> None:
        self._spec = spec
        self._projections = reader.linear("qkv", "z", "b", "a")
        self._out = reader.linear("out")
        self._conv = reader.array("conv.weight")
        self._dt_bias = reader.array("dt_bias")
        self._a_log = reader.array("a_log")
        self._norm = reader.array("norm.weight")
        self._activation = _ACTIVATIONS[spec.activation]
        self._conv_states = np.zeros((slots, spec.conv_kernel - 1, spec.conv_dim), np.float32)
        heads = (spec.n_value_heads, spec.key_head_dim, spec.value_head_dim)
        self._states = np.zeros((slots, *heads), np.float32)

    def linears(self) -> list[Linear]:
        return [self._projections, self._out]

    def __call__(self, hidden: FloatArray, batch: RaggedBatch, ropes: Ropes) -> FloatArray:
        """float32 [padded rows, hidden] to the same; advances the state of the batch's slots."""
        spec = self._spec
        ends = np.cumsum([spec.conv_dim, spec.value_dim, spec.n_value_heads])
        qkv, z, b, a = np.split(self._projections(hidden), ends, axis=-1)
        beta, g = sigmoid(b), decay_log(a, self._a_log, self._dt_bias)
        q, k, v = self._heads(self._convolve(qkv, batch))
        mixed = np.zeros((batch.padded_rows, spec.n_value_heads, spec.value_head_dim), np.float32)
        self._recur(_Inputs(q, k, v, g, beta), batch, mixed)
        gate = z.reshape(mixed.shape)
        gated = gated_rms_norm(mixed, gate, self._norm, spec.norm_eps)
        return self._out(gated.reshape(batch.padded_rows, spec.value_dim))

    def forget(self, slot: int) -> None:
        self._conv_states[slot] = 0
        self._states[slot] = 0

    def scrub(self, slot: int, pages: IntArray) -> None:
        self.forget(slot)

    def _convolve(self, qkv: FloatArray, batch: RaggedBatch) -> FloatArray:
        """q | k | v after convolution and activation, float32 [padded rows, conv_dim]."""
        convolved = np.zeros_like(qkv)
        for slot, start, end in _segments(batch):
            convolved[start:end], self._conv_states[slot] = causal_conv(
                qkv[start:end], self._conv_states[slot], self._conv
            )
        return self._activation(convolved)

    def _heads(self, qkv: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """q and k normalised, q scaled, both repeated for their value heads: [rows, value heads, dim]."""
        spec = self._spec
        q, k, v = np.split(qkv, [spec.key_dim, 2 * spec.key_dim], axis=-1)
        key_heads = (len(qkv), spec.n_key_heads, spec.key_head_dim)
        repeats = spec.n_value_heads // spec.n_key_heads
        q, k = l2_norm(q.reshape(key_heads)), l2_norm(k.reshape(key_heads))
        q *= np.float32(spec.key_head_dim**-0.5)
        values = v.reshape(len(qkv), spec.n_value_heads, spec.value_head_dim)
        return np.repeat(q, repeats, axis=1), np.repeat(k, repeats, axis=1), values

    def _recur(self, inputs: _Inputs, batch: RaggedBatch, out: FloatArray) -> None:
        """Runs the recurrence into out [padded rows, value heads, value_head_dim].

        Single tokens of all sequences go together, longer segments one after the other.
        """
        lengths = np.diff(batch.offsets)
        single = np.flatnonzero(lengths == 1)
        if len(single):
            rows, slots = batch.offsets[single], batch.slots[single]
            states = self._states[slots]
            out[rows] = _step(inputs.at(rows), states)
            self._states[slots] = states
        for segment in np.flatnonzero(lengths > 1):
            state = self._states[batch.slots[segment]]
            row, end = batch.offsets[segment : segment + 2].tolist()
            position = int(batch.starts[segment])
            while row < end:
                count = min(end - row, CHUNK - position % CHUNK)
                chunk = slice(row, row + count)
                out[chunk] = _advance(inputs.at(chunk), state)
                row, position = row + count, position + count


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What the recurrence reads of each row, rows first."""

    q: FloatArray
    k: FloatArray
    v: FloatArray
    g: FloatArray
    beta: FloatArray

    def at(self, rows: slice | IntArray) -> _Inputs:
        return _Inputs(self.q[rows], self.k[rows], self.v[rows], self.g[rows], self.beta[rows])


def _step(x: _Inputs, states: FloatArray) -> FloatArray:
    """One token of each of several sequences: [sequences, value heads, value_head_dim]."""
    return delta_step(x.q, x.k, x.v, x.g, x.beta, states)


def _advance(x: _Inputs, state: FloatArray) -> FloatArray:
    """Up to CHUNK tokens of one sequence, rows first; one token is a step wherever it stands."""
    if len(x.q) == 1:
        return _step(x, state[None])
    q, k, v, g, beta = (part.swapaxes(0, 1) for part in (x.q, x.k, x.v, x.g, x.beta))
    return delta_chunk(q, k, v, g, beta, state).swapaxes(0, 1)


def _segments(batch: RaggedBatch) -> list[tuple[int, int, int]]:
    """(slot, first row, end) of each."""
    offsets = batch.offsets.tolist()
    return list(zip(batch.slots.tolist(), offsets[:-1], offsets[1:], strict=True))
