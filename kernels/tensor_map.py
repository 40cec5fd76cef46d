"""Descriptors for Hopper's tensor copies (TMA): a kernel argument that tells how an array lies in memory.

Encoded by the driver; the copies themselves are the kernels'. Knows no kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

from cuda.bindings import driver

from kernels.errors import KernelError
from kernels.tensor import Tensor

_BFLOAT16 = 9
"""CU_TENSOR_MAP_DATA_TYPE_BFLOAT16."""
_SWIZZLE_128_BYTES = 3
_PROMOTE_TO_256_BYTES = 3
"""How much L2 fetches at least."""
_ATOM_COLUMNS = 64
"""bf16 of a swizzled row of 128 bytes."""


class TensorMap(ctypes.Structure):
    """CUtensorMap."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


def page_map(pages: Tensor) -> TensorMap:
    """KV pages for copies of one head of one page: bf16 [pages, n_kv_heads, rows, head_dim].

    Four dimensions, innermost first: 64 columns, the rows, head_dim / 64 groups of columns, pages · heads;
    a copy takes all of the first three, 16-byte chunks swizzled by row, and rows outside a page as zeros.
    Raises KernelError.
    """
    count, heads, rows, head_dim = pages.shape
    groups = head_dim // _ATOM_COLUMNS
    dims = (_ATOM_COLUMNS, rows, groups, count * heads)
    strides = (head_dim * 2, _ATOM_COLUMNS * 2, rows * head_dim * 2)
    return encode(pages.address, dims, strides, (_ATOM_COLUMNS, rows, groups, 1))


def encode(address: int, dims: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> TensorMap:
    """A map of bf16 at a device address. strides: bytes, of all dimensions but the innermost; box: of a copy.

    Raises KernelError.
    """
    rank = len(dims)
    room = ctypes.create_string_buffer(2 * ctypes.sizeof(TensorMap))
    aligned = ctypes.addressof(room) + -ctypes.addressof(room) % ctypes.sizeof(TensorMap)
    status = _driver_encode()(
        aligned, _BFLOAT16, rank, address, (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * (rank - 1))(*strides), (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank), 0, _SWIZZLE_128_BYTES, _PROMOTE_TO_256_BYTES, 0,
    )  # fmt: skip
    if status:
        name = driver.CUresult(status).name
        raise KernelError(f"no tensor map of {list(dims)} by {list(box)} at {address:#x}: {name}")
    return TensorMap.from_buffer_copy(ctypes.string_at(aligned, ctypes.sizeof(TensorMap)))


@cache
def _driver_encode() -> Any:
    """cuTensorMapEncodeTiled as a plain C function: it wants its result at a multiple of 64 bytes."""
    status, address, _ = driver.cuGetProcAddress(b"cuTensorMapEncodeTiled", 12000, 0)
    if int(status) != 0:
        raise KernelError(f"the driver has no cuTensorMapEncodeTiled (needs CUDA 12 or newer): {status.name}")
    pointer, number, integer = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int
    return ctypes.CFUNCTYPE(
        integer, pointer, integer, number, pointer, *[pointer] * 4, integer, integer, integer, integer
    )(int(address))
