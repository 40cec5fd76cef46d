"""The products of few rows against float64, with and without what is fused into them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from kernel_support import Gpu, random_bf16

from kernels.skinny import VARIANTS, Finish, FusedNorm, SkinnyVariant, skinny_product
from kernels.tensor import DType

pytestmark = pytest.mark.gpu
BF16 = ml_dtypes.bfloat16
SHAPES = {True: (48, 96), False: (4096, 544), None: (176, 2080)}
"""(n, k): few blocks, many, and any; k that leaves some warps less than others."""


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.expression)
def test_a_product_of_few_rows(gpu: Gpu, rng: np.random.Generator, variant: SkinnyVariant, rows: int) -> None:
    if variant.one_row != (rows == 1):
        pytest.skip("the variant is for other numbers of rows")
    n, k = SHAPES[variant.few_blocks]
    x = random_bf16(rng, rows * k).reshape(rows, k)
    height = 2 * n if variant.finish is Finish.SWIGLU else n
    weight = (random_bf16(rng, height * k).reshape(height, k).astype(np.float32) / np.sqrt(k)).astype(BF16)
    gains = random_bf16(rng, k)
    before = (
        random_bf16(rng, rows * n).reshape(rows, n).astype(BF16 if variant.out is DType.BF16 else np.float32)
    )
    y = gpu.empty((rows, n), variant.out)
    if variant.finish is Finish.ADD:
        gpu.write(y, before)
    norm = FusedNorm(gpu.upload(gains), 1e-6, 0.5) if variant.norm else None
    launch = skinny_product(
        gpu.library,
        gpu.limits,
        x=gpu.upload(x),
        weight=gpu.upload(weight),
        y=y,
        finish=variant.finish,
        norm=norm,
    )
    assert launch.kernel.name == variant.expression
    gpu.run(launch)
    wanted = _exact(x, weight, before, variant, gains)
    found = gpu.download(y).astype(np.float64)
    np.testing.assert_allclose(found, wanted, rtol=2**-7, atol=2e-2)
    count = min(rows, 2)
    alone = gpu.empty((count, n), variant.out)
    if variant.finish is Finish.ADD:
        gpu.write(alone, before[-count:])
    gpu.run(
        skinny_product(
            gpu.library, gpu.limits, x=gpu.upload(x[-count:]), weight=gpu.upload(weight), y=alone,
            finish=variant.finish, norm=norm,
        )
    )  # fmt: skip
    np.testing.assert_array_equal(gpu.download(alone).astype(np.float64), found[-count:])


def _exact(
    x: np.ndarray, weight: np.ndarray, before: np.ndarray, variant: SkinnyVariant, gains: np.ndarray
) -> np.ndarray:
    values = x.astype(np.float64)
    if variant.norm:
        values /= np.sqrt(np.mean(values * values, axis=1, keepdims=True) + 1e-6)
        values *= 0.5 + gains.astype(np.float64)
    product = values @ weight.astype(np.float64).T
    if variant.finish is Finish.ADD:
        return product + before.astype(np.float64)
    if variant.finish is Finish.SWIGLU:
        gate, up = np.split(product, 2, axis=1)
        return gate / (1 + np.exp(-gate)) * up
    return product
