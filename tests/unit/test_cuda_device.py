"""Choosing a GPU, against a driver that says what each test wants: no GPU is needed, none is touched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings")

from cuda.bindings import driver as real

from engine.cuda import device
from engine.cuda.device import (
    CudaError,
    OutOfDeviceMemory,
    Stream,
    check,
    check_freed,
    choose_gpu,
    visible_gpus,
    why_no_gpu,
)
from engine.errors import ModelError
from kernels import launch
from kernels.errors import KernelError
from kernels.launch import KernelLibrary

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


def test_freeing_in_a_broken_context_says_nothing(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what could not be freed is not freed again."""
    fake(H200)
    check_freed((real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,), "freeing")
    with pytest.raises(CudaError, match="freeing failed: CUDA_ERROR_INVALID_VALUE"):
        check_freed((real.CUresult.CUDA_ERROR_INVALID_VALUE,), "freeing")
    answers = [real.CUresult.CUDA_ERROR_LAUNCH_FAILED, real.CUresult.CUDA_ERROR_INVALID_HANDLE]
    monkeypatch.setattr(device.driver, "cuStreamDestroy", lambda handle: (answers.pop(0),), raising=False)
    first, second = Stream(1), Stream(2)
    first.close()
    first.close()
    with pytest.raises(CudaError, match="destroying a stream failed: CUDA_ERROR_INVALID_HANDLE"):
        second.close()
    second.close()
    assert answers == []


def test_all_modules_are_unloaded_though_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, wrong = real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, real.CUresult.CUDA_ERROR_INVALID_HANDLE
    answers = [wrong, OK, broken]
    driver = SimpleNamespace(cuModuleUnload=lambda module: (answers.pop(),))
    monkeypatch.setattr(launch, "driver", driver)
    monkeypatch.setattr(launch, "error_text", lambda status: real.CUresult(status).name)
    library = KernelLibrary([], dependent_launch=False)
    library._modules.update({1: "first", 2: "second", 3: "third"})
    with pytest.raises(KernelError, match="module unload: CUDA_ERROR_INVALID_HANDLE"):
        library.close()
    assert answers == []
    library.close()


def test_a_context_that_cannot_be_used_is_let_go(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(H200)
    released: list[Any] = []
    for name, answer in (
        ("cuDevicePrimaryCtxRetain", lambda handle: (OK, "context")),
        ("cuCtxSetCurrent", lambda context: (real.CUresult.CUDA_ERROR_INVALID_CONTEXT,)),
        ("cuDevicePrimaryCtxRelease", released.append),
    ):
        monkeypatch.setattr(device.driver, name, answer, raising=False)
    with pytest.raises(CudaError, match="making the context current failed"):
        device.Device.open(0)
    assert released == [0]
