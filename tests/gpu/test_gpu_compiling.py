"""NVRTC beside a driver, whose cache it knows: what only shows where there is a GPU."""

from __future__ import annotations

import pytest
from cuda_support import needs_gpu, opened_device

from kernels.compiler import CompileUnit, compile_unit

pytestmark = needs_gpu

UNIT = CompileUnit("activation.cu", ("gated_activation<false, false>",))


@pytest.mark.parametrize("time", ["first", "second", "third"])
def test_resources_are_reported_each_time(time: str) -> None:
    """Also of a unit that the driver has in its cache, from this process or one before."""
    with opened_device() as device:
        compiled = compile_unit(UNIT, device.limits.arch, cache_folder=None)
    assert compiled.resources[UNIT.expressions[0]].registers > 0
    assert not compiled.from_cache
