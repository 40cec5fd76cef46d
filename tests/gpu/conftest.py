"""Fixtures of the tests that need a GPU: they are skipped, with the reason, where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest


def _why_not() -> str | None:
    try:
        from cuda.bindings import driver

        status, *_ = driver.cuInit(0)
        if int(status) == 0:
            status, count = driver.cuDeviceGetCount()
            return None if int(status) == 0 and count > 0 else "no NVIDIA GPU"
    except (ImportError, RuntimeError) as error:
        return f"no CUDA driver: {error}"
    return f"the CUDA driver does not start: {status.name}"


@pytest.fixture(scope="session")
def shared_gpu() -> object:
    reason = _why_not()
    if reason is not None:
        pytest.skip(reason)
    from kernel_support import Gpu

    return Gpu()


@pytest.fixture
def gpu(shared_gpu: object) -> Iterator[object]:
    """The GPU, with all buffers freed after the test."""
    yield shared_gpu
    shared_gpu.release()  # type: ignore[attr-defined]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Differs from test to test, the same from run to run."""
    return np.random.default_rng(list(request.node.nodeid.encode()))
