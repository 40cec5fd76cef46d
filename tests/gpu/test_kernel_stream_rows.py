"""2 to 8 rows times bf16 weights streamed by blocks that stay, against float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from kernel_support import Gpu, assert_close, random_bf16
from test_kernel_skinny import random_weight

from kernels.fused import Finish
from kernels.skinny import WeightKind
from kernels.skinny_rows import ARCH, VARIANTS, RowsVariant, skinny_rows
from kernels.tensor import DType, Tensor

pytestmark = pytest.mark.gpu
SHAPES = (
    *((16, 32), (48, 96), (176, 576), (2048, 2048), (4112, 544), (19232, 96)),
    *((304, 4096), (176, 3040), (48, 6144)),
)
"""(n, k): fewer chunks than warps, part pieces at the end, several batches of sums."""
ROWS = (1, 2, 3, 7, 8)


def _name(variant: RowsVariant) -> str:
    return f"{variant.finish.name.lower()}-{variant.shape.warps}x{variant.shape.steps}"


@dataclass(frozen=True)
class Case:
    """A product's inputs; weights in float64 too."""

    x: np.ndarray
    weight: Tensor
    exact: np.ndarray
    before: np.ndarray

    def found(self, gpu: Gpu, variant: RowsVariant, rows: int) -> np.ndarray:
        """What the kernel makes of the first rows."""
        before = self.before[:rows]
        y = gpu.empty(before.shape, DType.BF16)
        if variant.finish is Finish.ADD:
            gpu.write(y, before)
        x = gpu.upload(self.x[:rows])
        gpu.run(skinny_rows(gpu.library, gpu.limits, variant, x=x, weight=self.weight, y=y))
        return gpu.download(y)

    def wanted(self, variant: RowsVariant) -> np.ndarray:
        product = self.x.astype(np.float64) @ self.exact.T
        if variant.finish is Finish.ADD:
            return np.asarray(product + self.before.astype(np.float64))
        if variant.finish is Finish.SWIGLU:
            gate, up = np.split(product, 2, axis=1)
            return np.asarray(gate / (1 + np.exp(-gate)) * up)
        return np.asarray(product)


@pytest.fixture(autouse=True)
def _on_hopper(gpu: Gpu) -> None:
    if gpu.limits.arch != ARCH:
        pytest.skip(f"a kernel for {ARCH} alone")


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("variant", VARIANTS, ids=_name)
def test_stream_of_rows(gpu: Gpu, rng: np.random.Generator, variant: RowsVariant, n: int, k: int) -> None:
    """Right, and a row's sum is the same among any others."""
    if k > variant.shape.most_k:
        pytest.skip("longer than the variant's warps reach")
    weight, exact = random_weight(gpu, rng, WeightKind.BF16, n * variant.groups, k)
    assert isinstance(weight, Tensor)
    x, before = random_bf16(rng, max(ROWS), k), random_bf16(rng, max(ROWS), n)
    case = Case(x, weight, exact, before)
    wanted, all_found = case.wanted(variant), case.found(gpu, variant, max(ROWS))
    for rows in ROWS:
        found = case.found(gpu, variant, rows)
        assert_close(f"{rows} × {n} × {k}", found, wanted[:rows], rtol=2**-8, atol=4e-3)
        np.testing.assert_array_equal(found.view(np.uint8), all_found[:rows].view(np.uint8))
    gpu.release()
