"""A Device for tests of engine/cuda: memory that is freed, poisoned outputs, copies to and from numpy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from kernel_support import NUMPY_TYPES

from engine.cuda.device import Device, check, why_no_gpu
from kernels.tensor import DType, Tensor

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(why_no_gpu() is not None, reason=str(why_no_gpu()))]
"""For `pytestmark` of test modules."""


class Memory:
    """Device memory for one test."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._blocks: list[int] = []

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """All bytes 0xFF: NaN for floats."""
        tensor = Tensor(0, shape, dtype)
        address = self.device.allocate(tensor.bytes)
        self._blocks.append(address)
        tensor = Tensor(address, shape, dtype)
        self.poison(tensor)
        return tensor

    def poison(self, tensor: Tensor) -> None:
        check(driver.cuMemsetD8(tensor.address, 0xFF, tensor.bytes), "poisoning")
        self.device.synchronize()

    def upload(self, array: np.ndarray) -> Tensor:
        dtype = next(dtype for dtype, numpy_type in NUMPY_TYPES.items() if array.dtype == numpy_type)
        tensor = self.empty(array.shape, dtype)
        array = np.ascontiguousarray(array)
        check(driver.cuMemcpyHtoD(tensor.address, array.ctypes.data, array.nbytes), "uploading")
        self.device.synchronize()  # the tests' streams do not wait for the copy
        return tensor

    def download(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        self.device.synchronize()
        array = np.empty(tensor.shape, NUMPY_TYPES[tensor.dtype])
        check(driver.cuMemcpyDtoH(array.ctypes.data, tensor.address, array.nbytes), "downloading")
        return array

    def release(self) -> None:
        self.device.synchronize()
        while self._blocks:
            self.device.free(self._blocks.pop())


@contextmanager
def opened_device() -> Iterator[Device]:
    device = Device.open(0)
    try:
        yield device
    finally:
        device.close()
