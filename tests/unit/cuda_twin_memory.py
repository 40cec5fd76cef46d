"""Host memory by address, for the numpy twins of the CUDA kernels."""

from __future__ import annotations

import ctypes
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from kernels.slots import SlotArrays
from kernels.tensor import DType, Tensor

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
F16, F32, I32, U32, U8 = (np.dtype(t) for t in (np.float16, np.float32, np.int32, np.uint32, np.uint8))
_TYPES = {
    DType.BF16: BF16,
    DType.E4M3: E4M3,
    DType.F16: F16,
    DType.F32: F32,
    DType.I32: I32,
    DType.U32: U32,
    DType.U8: U8,
}
C_TYPES = {"float": F32, "bf16": BF16}
PAGE = 64


def array(address: int, dtype: np.dtype[Any], *shape: int) -> np.ndarray:
    """Host memory as an array."""
    size = prod(shape) * dtype.itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype).reshape(shape)


def view(tensor: Tensor) -> np.ndarray:
    return array(tensor.address, _TYPES[tensor.dtype], *tensor.shape)


def slot_entry(arrays: SlotArrays, name: str, dtype: np.dtype[Any], slot: int) -> np.ndarray:
    """One slot's entry of a per-slot array, as an array of one."""
    return array(getattr(arrays, name) + slot * dtype.itemsize, dtype, 1)
