"""One row times q4_0 weights streamed by blocks that stay, against float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from kernel_support import Gpu, assert_close, random_bf16
from test_kernel_skinny import random_weight

from kernels.fused import Finish, FusedNorm
from kernels.q4 import Q4Tiles
from kernels.skinny import WeightKind
from kernels.skinny_stream import ARCH, VARIANTS, StreamVariant, skinny_stream
from kernels.tensor import DType

pytestmark = pytest.mark.gpu
SHAPES = (
    *((16, 32), (48, 96), (176, 576), (2048, 2048), (4112, 544), (19232, 96)),
    *((304, 4096), (176, 3040), (48, 6144), (32, 14336)),
)
"""(n, k): fewer tiles than warps, half tiles and part pieces at the end, several batches of sums."""
EPSILON, OFFSET = 1e-6, 0.5


def _name(variant: StreamVariant) -> str:
    shape = variant.shape
    words = (variant.out.value, variant.finish.name.lower(), "normed" * variant.norm)
    return "-".join((*filter(None, words), f"{shape.warps}x{shape.steps}"))


@dataclass(frozen=True)
class Case:
    """A product's inputs; weights in float64, dequantised."""

    x: np.ndarray
    weight: Q4Tiles
    exact: np.ndarray
    before: np.ndarray
    gains: np.ndarray

    def found(self, gpu: Gpu, variant: StreamVariant) -> np.ndarray:
        """What the kernel makes of it."""
        y = gpu.empty(self.before.shape, variant.out)
        if variant.finish is Finish.ADD:
            gpu.write(y, self.before)
        norm = FusedNorm(gpu.upload(self.gains), EPSILON, OFFSET) if variant.norm else None
        x = gpu.upload(self.x)
        gpu.run(skinny_stream(gpu.library, gpu.limits, variant, x=x, weight=self.weight, y=y, norm=norm))
        return gpu.download(y)

    def wanted(self, variant: StreamVariant) -> np.ndarray:
        values = self.x.astype(np.float64)
        if variant.norm:
            values = values / np.sqrt(np.mean(values * values) + EPSILON)
            values *= OFFSET + self.gains.astype(np.float64)
        product = values @ self.exact.T
        if variant.finish is Finish.ADD:
            return np.asarray(product + self.before.astype(np.float64))
        if variant.finish is Finish.SWIGLU:
            gate, up = np.split(product, 2, axis=1)
            return np.asarray(gate / (1 + np.exp(-gate)) * up)
        return np.asarray(product)


def _case(gpu: Gpu, rng: np.random.Generator, variant: StreamVariant, n: int, k: int) -> Case:
    weight, exact = random_weight(gpu, rng, WeightKind.Q4, n * variant.groups, k)
    assert isinstance(weight, Q4Tiles)
    return Case(random_bf16(rng, 1, k), weight, exact, random_bf16(rng, 1, n), random_bf16(rng, k))


@pytest.fixture(autouse=True)
def _on_hopper(gpu: Gpu) -> None:
    if gpu.limits.arch != ARCH:
        pytest.skip(f"a kernel for {ARCH} alone")


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("variant", VARIANTS, ids=_name)
def test_stream_of_one_row(
    gpu: Gpu, rng: np.random.Generator, variant: StreamVariant, n: int, k: int
) -> None:
    if k > variant.shape.most_k:
        pytest.skip("longer than the variant's warps reach")
    case = _case(gpu, rng, variant, n, k)
    # The rounding of an x that the kernel normalises, 2⁻⁹ of each element, adds up.
    rtol, atol = (2**-8, 4e-3) if variant.out is DType.BF16 else (1e-5, 2e-5)
    found = case.found(gpu, variant)
    assert_close(f"{n} × {k}", found, case.wanted(variant), rtol=rtol, atol=2e-2 if variant.norm else atol)
    np.testing.assert_array_equal(found.view(np.uint8), case.found(gpu, variant).view(np.uint8))
    gpu.release()


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.out is DType.F32], ids=_name)
def test_a_streamed_row_with_one_large_element(
    gpu: Gpu, rng: np.random.Generator, variant: StreamVariant
) -> None:
    """Beside an element of 3,000 the others err by at most 2⁻²² of it."""
    case = _case(gpu, rng, variant, 48, 2048)
    case.x[0, 77] = 3000
    wanted = case.wanted(variant)
    atol = 3000 * 2**-22 * np.abs(case.exact).sum(axis=1).max()
    assert_close("3,000", case.found(gpu, variant), wanted, rtol=1e-5, atol=atol)
    gpu.release()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("variant", VARIANTS, ids=_name)
def test_a_streamed_row_that_is_not_finite(
    gpu: Gpu, rng: np.random.Generator, variant: StreamVariant, value: float
) -> None:
    """No sum is finite then, whatever the warp that has the element."""
    case = _case(gpu, rng, variant, 48, 1024)
    for place in (0, 500, 1023):
        x = case.x.copy()
        x[0, place] = value
        found = Case(x, case.weight, case.exact, case.before, case.gains).found(gpu, variant)
        assert not np.isfinite(found.astype(np.float64)).any()
    gpu.release()
