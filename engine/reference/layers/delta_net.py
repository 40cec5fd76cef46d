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

    A prompt runs in blocks that begin at multiples of CHUNK. Where a chunk ends inside a block, the block
    is kept and its next rows are computed from its beginning: wherever a prompt is cut, its bits are the
    same. Decode takes the step form; the two forms agree closely, not in every bit.
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
        self._blocks: dict[int, _Block] = {}
        """By slot, where a prompt has been cut inside a block."""

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
        self._blocks.pop(slot, None)

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

        Decode rows of all sequences take one step together; chunks go one after the other.
        """
        if batch.is_decode.any():
            rows, slots = batch.offsets[:-1][batch.is_decode], batch.slots[batch.is_decode]
            states = self._states[slots]
            x = inputs.at(rows)
            out[rows] = delta_step(x.q, x.k, x.v, x.g, x.beta, states)
            self._states[slots] = states
            for slot in slots.tolist():
                self._blocks.pop(slot, None)
        for segment in np.flatnonzero(~batch.is_decode):
            slot, position = int(batch.slots[segment]), int(batch.starts[segment])
            row, end = batch.offsets[segment : segment + 2].tolist()
            while row < end:
                count = min(end - row, CHUNK - position % CHUNK)
                chunk = slice(row, row + count)
                row, position = row + count, position + count
                out[chunk] = self._extend_block(slot, inputs.at(chunk), fills_it=position % CHUNK == 0)

    def _extend_block(self, slot: int, x: _Inputs, *, fills_it: bool) -> FloatArray:
        """Results of the next rows of the slot's block, [rows, value heads, value_head_dim]."""
        state = self._states[slot]
        block = self._blocks.pop(slot, None) or _Block.after(state, x)
        first = block.length
        block.append(x)
        state[...] = block.before
        q, k, v, g, beta = (part.swapaxes(0, 1) for part in block.inputs.parts())
        results = delta_chunk(q, k, v, g, beta, state).swapaxes(0, 1)[first : block.length]
        if not fills_it:
            self._blocks[slot] = block
        return results


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

    def parts(self) -> tuple[FloatArray, ...]:
        return self.q, self.k, self.v, self.g, self.beta


@dataclass(slots=True)
class _Block:
    """CHUNK tokens of a prompt, of which the first `length` are there and the rest are zero.

    Rows of zeros change nothing that stands before them, and the products have one shape at any length:
    so a token's result, and the state after it, do not depend on where chunks were cut.
    """

    before: FloatArray
    """The state before the block's first token."""
    inputs: _Inputs
    length: int = 0

    @classmethod
    def after(cls, state: FloatArray, like: _Inputs) -> _Block:
        """An empty block for inputs of the same sizes."""
        parts = (np.zeros((CHUNK, *part.shape[1:]), np.float32) for part in like.parts())
        return cls(state.copy(), _Inputs(*parts))

    def append(self, x: _Inputs) -> None:
        end = self.length + len(x.q)
        for mine, new in zip(self.inputs.parts(), x.parts(), strict=True):
            mine[self.length : end] = new
        self.length = end


def _segments(batch: RaggedBatch) -> list[tuple[int, int, int]]:
    """(slot, first row, end) of each."""
    offsets = batch.offsets.tolist()
    return list(zip(batch.slots.tolist(), offsets[:-1], offsets[1:], strict=True))
