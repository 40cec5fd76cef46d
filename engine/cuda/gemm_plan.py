"""A matrix product with its algorithm chosen, and the same bound to buffers. Knows no tuning and no model.

Descriptors, algorithm and workspace are settled before a graph is captured and outlive it. Calling a Gemm
with a stream enqueues it, as a kernel's Launch does.
"""

from __future__ import annotations

import ctypes

from nvmath.bindings import cublasLt

from engine.cuda.cublaslt import (
    OPERAND_ALIGNMENT,
    Algorithm,
    Product,
    destroy_operation,
    matmul_error,
    operation,
)
from engine.cuda.gemm_key import Epilogue
from kernels.tensor import DType, Tensor

WORKSPACE_BYTES = 32 << 20
"""Of each stream's workspace: what cuBLAS itself takes on Hopper."""

_FACTORS = (ctypes.c_float * 2)(0.0, 1.0)
_ZERO = ctypes.addressof(_FACTORS)
_ONE = _ZERO + ctypes.sizeof(ctypes.c_float)


class Gemm:
    """A product of fixed buffers, ready to be enqueued any number of times, eagerly or into a capture."""

    __slots__ = ("_arguments", "_plan", "key")

    def __init__(self, plan: GemmPlan, arguments: tuple[int, ...]) -> None:
        """arguments: of cublasLtMatmul, all but the stream."""
        self.key = plan.key
        self._plan = plan
        self._arguments = arguments

    def __call__(self, stream: int) -> None:
        """stream: a CUstream handle. Raises CudaError with the product's key."""
        try:
            cublasLt.matmul(*self._arguments, stream)
        except cublasLt.cuBLASLtError as error:
            raise matmul_error(self.key, error) from error


class GemmPlan:
    """How to compute one key. Made by GemmPlanner, which must outlive it."""

    __slots__ = ("_handle", "_operations", "_product", "_words", "algorithm", "is_tuned", "key")

    def __init__(self, handle: int, product: Product, algorithm: Algorithm, *, is_tuned: bool) -> None:
        self.key = product.key
        self.algorithm = algorithm
        self.is_tuned = is_tuned
        """False for the heuristic's first choice."""
        self._handle = handle
        self._product = product
        self._words = algorithm.array()
        self._operations: list[int] = []

    def bind(
        self,
        *,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        workspace: Tensor,
        bias: Tensor | None = None,
        c: Tensor | None = None,
    ) -> Gemm:
        """The product of these buffers.

        x, w, y, c  as the key has them: [rows, k], [n, k], [rows, n], [rows, n]; c with Epilogue.ADD only
        bias        [n] of y's type, with Epilogue.BIAS only
        workspace   u8 [WORKSPACE_BYTES], of the one stream this Gemm will run on

        Raises ValueError for buffers that do not fit the key.
        """
        key = self.key
        self._expect("x", x, key.x, (key.rows, key.k))
        self._expect("w", w, key.w, (key.n, key.k))
        self._expect("y", y, key.y, (key.rows, key.n))
        if (bias is not None) != (key.epilogue is Epilogue.BIAS):
            raise ValueError(f"{key}: a bias goes with the epilogue bias, and only with it")
        if (c is not None) != (key.epilogue is Epilogue.ADD):
            raise ValueError(f"{key}: c goes with the epilogue add, and only with it")
        if bias is not None:
            self._expect("bias", bias, key.y, (key.n,))
        if c is not None:
            self._expect("c", c, key.y, (key.rows, key.n))
        if workspace.dtype is not DType.U8 or workspace.bytes < self.algorithm.workspace:
            raise ValueError(f"{key}: the workspace must be u8 [{self.algorithm.workspace}] at least")
        arguments = self._arguments(
            x.address, w.address, y.address, workspace.address,
            c=y.address if c is None else c.address, bias=0 if bias is None else bias.address,
        )  # fmt: skip
        return Gemm(self, arguments)

    def _arguments(self, x: int, w: int, y: int, workspace: int, *, c: int, bias: int) -> tuple[int, ...]:
        """Of cublasLtMatmul, all but the stream. A bias is part of the operation, so each has its own."""
        product = self._product
        compute = product.operation
        if bias:
            compute = operation(self.key, bias)
            self._operations.append(compute)
        beta = _ONE if self.key.epilogue is Epilogue.ADD else _ZERO
        layout = product.y_layout
        return (
            self._handle, compute, _ONE, w, product.w_layout, x, product.x_layout, beta, c, layout, y, layout,
            self._words.ctypes.data, workspace, self.algorithm.workspace,
        )  # fmt: skip

    def close(self) -> None:
        """Lets go of what bind() made; nothing bound may be used any more. Idempotent."""
        while self._operations:
            destroy_operation(self._operations.pop())

    def _expect(self, name: str, tensor: Tensor, dtype: DType, shape: tuple[int, ...]) -> None:
        if tensor.dtype is not dtype or tensor.shape != shape:
            raise ValueError(
                f"{self.key}: {name} must be {dtype.value} {list(shape)}, "
                f"got {tensor.dtype.value} {list(tensor.shape)}"
            )
        if tensor.address % OPERAND_ALIGNMENT:
            raise ValueError(f"{self.key}: {name} is not aligned to {OPERAND_ALIGNMENT} bytes")
