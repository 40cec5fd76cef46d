"""Choosing a GPU, against a driver that says what each test wants: no GPU is needed, none is touched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings")

from cuda.bindings import driver as real

from engine.cuda import device
from engine.cuda.device import CudaError, OutOfDeviceMemory, check, choose_gpu, visible_gpus, why_no_gpu
from engine.errors import ModelError

OK = real.CUresult.CUDA_SUCCESS
H200 = ("NVIDIA H200", (9, 0), 141 << 30)
V100 = ("Tesla V100", (7, 0), 16 << 30)


def _driver(
    gpus: list[tuple[str, tuple[int, int], int]], *, init: Any = OK, version: int = 13000
) -> SimpleNamespace:
    attributes = real.CUdevice_attribute
    index = {
        attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 0,
        attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 1,
    }
    return SimpleNamespace(
        CUresult=real.CUresult,
        CUdevice_attribute=attributes,
        cuInit=lambda flags: (init,),
        cuDriverGetVersion=lambda: (OK, version),
        cuDeviceGetCount=lambda: (OK, len(gpus)),
        cuDeviceGet=lambda ordinal: (OK, ordinal),
        cuDeviceGetName=lambda length, handle: (OK, gpus[handle][0].encode() + b"\0\0"),
        cuDeviceGetAttribute=lambda attribute, handle: (OK, gpus[handle][1][index[attribute]]),
        cuDeviceTotalMem=lambda handle: (OK, gpus[handle][2]),
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(*gpus: tuple[str, tuple[int, int], int], **answers: Any) -> None:
        monkeypatch.setattr(device, "driver", _driver(list(gpus), **answers))
        monkeypatch.setattr(device, "error_text", lambda code: real.CUresult(code).name)

    return install


def test_a_usable_gpu(fake: Any) -> None:
    fake(V100, H200)
    assert why_no_gpu(1) is None
    assert choose_gpu(1).name == "NVIDIA H200"
    assert [str(gpu) for gpu in visible_gpus()] == [
        "0: Tesla V100 (7.0, 16 GiB)",
        "1: NVIDIA H200 (9.0, 141 GiB)",
    ]


def test_reasons_against_a_gpu(fake: Any) -> None:
    fake(V100)
    assert why_no_gpu(0) == (
        "GPU 0: Tesla V100 (7.0, 16 GiB) is too old: compute capability 8.0 or newer is needed"
    )
    assert why_no_gpu(1) == "there is no GPU 1; visible are 0: Tesla V100 (7.0, 16 GiB)"
    assert why_no_gpu(-1) == "there is no GPU -1; visible are 0: Tesla V100 (7.0, 16 GiB)"
    fake()
    assert why_no_gpu() == "there is no NVIDIA GPU that this process can see"
    fake(init=real.CUresult.CUDA_ERROR_NO_DEVICE)
    assert why_no_gpu() == "there is no NVIDIA GPU that this process can see"
    fake(H200, version=12080)
    assert why_no_gpu() == "the NVIDIA driver supports CUDA 12.8; 13.0 or newer is needed"
    fake(H200, init=real.CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)
    assert why_no_gpu() == "the NVIDIA driver does not start (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)"


def test_no_driver_at_all(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(H200)

    def missing(flags: int) -> None:
        raise RuntimeError("libcuda.so.1 not found")

    monkeypatch.setattr(device.driver, "cuInit", missing)
    assert why_no_gpu() == "the NVIDIA driver cannot be loaded (libcuda.so.1 not found)"
    with pytest.raises(ModelError, match="cannot be loaded"):
        choose_gpu(0)


def test_check_unpacks_and_names_what_failed(fake: Any) -> None:
    fake(H200)
    assert check((OK,), "nothing") is None
    assert check((OK, 7), "one") == 7
    assert check((OK, 7, 8), "two") == (7, 8)
    with pytest.raises(CudaError, match="pouring tea failed: CUDA_ERROR_INVALID_VALUE") as failure:
        check((real.CUresult.CUDA_ERROR_INVALID_VALUE,), "pouring tea")
    assert not isinstance(failure.value, OutOfDeviceMemory)
    with pytest.raises(OutOfDeviceMemory):
        check((real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None), "allocating")
