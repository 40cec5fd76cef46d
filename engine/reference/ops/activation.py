"""Element-wise non-linearities of gated feed-forwards and of DeltaNet. Knows no layer."""

from __future__ import annotations

import numpy as np

from engine.reference.arrays import FloatArray

_GELU_SCALE = np.float32(np.sqrt(2 / np.pi))
_GELU_CUBIC = np.float32(0.044715)


def sigmoid(x: FloatArray) -> FloatArray:
    """1 / (1 + exp(−x)); exp overflows to infinity for x below −88, which yields the right 0."""
    result: FloatArray = np.negative(x)
    np.exp(result, out=result)
    result += np.float32(1)
    return np.reciprocal(result, out=result)


def silu(x: FloatArray) -> FloatArray:
    """x · sigmoid(x)."""
    result = np.negative(x)
    np.exp(result, out=result)
    result += np.float32(1)
    return np.divide(x, result, out=result)


def gelu_tanh(x: FloatArray) -> FloatArray:
    """0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))."""
    inner: FloatArray = np.square(x)
    inner *= _GELU_CUBIC
    inner += np.float32(1)
    inner *= x
    inner *= _GELU_SCALE
    np.tanh(inner, out=inner)
    inner += np.float32(1)
    inner *= x
    inner *= np.float32(0.5)
    return inner


def silu_mul(gate_up: FloatArray) -> FloatArray:
    """SwiGLU: float32 [rows, 2 · intermediate], gate first, to silu(gate) · up [rows, intermediate]."""
    intermediate = gate_up.shape[-1] // 2
    result = silu(gate_up[..., :intermediate])
    result *= gate_up[..., intermediate:]
    return result


def gelu_tanh_mul(gate_up: FloatArray) -> FloatArray:
    """GeGLU: float32 [rows, 2 · intermediate], gate first, to gelu_tanh(gate) · up [rows, intermediate]."""
    intermediate = gate_up.shape[-1] // 2
    result = gelu_tanh(gate_up[..., :intermediate])
    result *= gate_up[..., intermediate:]
    return result


def softplus(x: FloatArray) -> FloatArray:
    """log(1 + exp(x)), without overflow."""
    return np.logaddexp(np.float32(0), x)


def softcap(x: FloatArray, cap: float) -> FloatArray:
    """cap · tanh(x / cap), in place; returns x."""
    x /= np.float32(cap)
    np.tanh(x, out=x)
    x *= np.float32(cap)
    return x
