"""SwiGLU and GeGLU from the merged gate|up product (activation.cu)."""

from __future__ import annotations

from typing import Literal

from kernels.compiler import CompileUnit
from kernels.launch import Dim3, KernelLibrary, Launch, i32
from kernels.tensor import DType, Tensor, expect

SOURCE = "activation.cu"
_EXPRESSIONS = {"silu": "gated_activation<false>", "gelu_tanh": "gated_activation<true>"}
UNITS = (CompileUnit(SOURCE, tuple(_EXPRESSIONS.values())),)
_VECTOR = 8
_MOST_THREADS = 256


def gated_activation(
    library: KernelLibrary, *, gate_up: Tensor, out: Tensor, activation: Literal["silu", "gelu_tanh"] = "silu"
) -> Launch:
    """out = activation(gate) · up. gate_up: bf16 [rows, 2 · inter], gate first; out: bf16 [rows, inter].

    inter must be a multiple of 8. Raises ValueError for shapes that do not fit.
    """
    rows, inter = out.shape
    expect(SOURCE, "out", out, DType.BF16, (rows, inter))
    expect(SOURCE, "gate_up", gate_up, DType.BF16, (rows, 2 * inter))
    if inter % _VECTOR:
        raise ValueError(f"{SOURCE}: inter {inter} must be a multiple of {_VECTOR}")
    vectors = inter // _VECTOR
    threads = min(_MOST_THREADS, -(-vectors // 32) * 32)
    kernel = library.kernel(SOURCE, _EXPRESSIONS[activation])
    return Launch(kernel, Dim3(-(-vectors // threads), rows), Dim3(threads), (gate_up, out, i32(inter)))
