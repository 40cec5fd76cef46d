"""Products of few rows against float64, for each kind of weight, with and without what is fused."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from kernel_support import Gpu, assert_close, random_bf16

from kernels.fp8 import Fp8Rows
from kernels.q4 import Q4Tiles
from kernels.skinny import VARIANTS, Finish, FusedNorm, SkinnyVariant, Weight, WeightKind, skinny_product
from kernels.tensor import DType, Tensor

pytestmark = pytest.mark.gpu
BF16 = ml_dtypes.bfloat16
ROWS = (1, 2, 3, 7, 8)
SHAPES = ((16, 32), (48, 96), (176, 160), (576, 576), (8464, 96), (176, 2048), (48, 6144), (32, 14336))
"""(n, k): fewer steps than warps, half steps at the end, several tiles for a block, a long k."""
EPSILON, OFFSET = 1e-6, 0.5


@dataclass(frozen=True)
class Case:
    """A product's inputs on the host; weights in float64, dequantised."""

    x: np.ndarray
    exact: np.ndarray
    weight: Weight
    before: np.ndarray
    gains: np.ndarray

    def launch_rows(self, gpu: Gpu, variant: SkinnyVariant, first: int, last: int) -> np.ndarray:
        """What the kernel makes of some of the rows."""
        n = self.before.shape[1]
        y = gpu.empty((last - first, n), variant.out)
        if variant.finish is Finish.ADD:
            gpu.write(y, self.before[first:last])
        launch = skinny_product(
            gpu.library,
            gpu.limits,
            x=gpu.upload(self.x[first:last]),
            weight=self.weight,
            y=y,
            finish=variant.finish,
            norm=FusedNorm(gpu.upload(self.gains), EPSILON, OFFSET) if variant.norm else None,
            variant=variant,
        )
        gpu.run(launch)
        return gpu.download(y)

    def wanted(self, variant: SkinnyVariant) -> np.ndarray:
        values = self.x.astype(np.float64)
        if variant.norm:
            values = values / np.sqrt(np.mean(values * values, axis=1, keepdims=True) + EPSILON)
            values *= OFFSET + self.gains.astype(np.float64)
        product = values @ self.exact.T
        if variant.finish is Finish.ADD:
            return np.asarray(product + self.before.astype(np.float64))
        if variant.finish is Finish.SWIGLU:
            gate, up = np.split(product, 2, axis=1)
            return np.asarray(gate / (1 + np.exp(-gate)) * up)
        return np.asarray(product)


def _name(variant: SkinnyVariant) -> str:
    ring = variant.ring
    words = (variant.kind.value, variant.out.value, variant.finish.name.lower(), "normed" * variant.norm)
    rows = "one" if variant.one_row else "some"
    return "-".join(
        (
            *filter(None, words),
            rows,
            "staged" if ring.staged else "read",
            f"{ring.warps}x{ring.share}x{ring.group}x{ring.stages}",
        )
    )


@pytest.mark.parametrize("variant", VARIANTS, ids=_name)
def test_a_product_of_few_rows(gpu: Gpu, rng: np.random.Generator, variant: SkinnyVariant) -> None:
    for n, k in SHAPES:
        case = _case(gpu, rng, variant, max(ROWS), n, k)
        wanted = case.wanted(variant)
        counts = [rows for rows in ROWS if variant.one_row == (rows == 1)]
        counts = [rows for rows in counts if variant.fits(gpu.limits, rows, k)]
        all_found = case.launch_rows(gpu, variant, 0, counts[-1])
        for rows in counts:
            found = case.launch_rows(gpu, variant, 0, rows)
            # The rounding of an x that the kernel normalises, 2⁻⁹ of each element, adds up.
            rtol, atol = (2**-8, 4e-3) if variant.out is DType.BF16 else (1e-5, 1e-4)
            assert_close(
                f"{rows} × {n} × {k}", found, wanted[:rows], rtol=rtol, atol=2e-2 if variant.norm else atol
            )
            np.testing.assert_array_equal(found.astype(np.float64), all_found[:rows].astype(np.float64))
        gpu.release()


def _case(gpu: Gpu, rng: np.random.Generator, variant: SkinnyVariant, rows: int, n: int, k: int) -> Case:
    height = 2 * n if variant.finish is Finish.SWIGLU else n
    weight, exact = random_weight(gpu, rng, variant.kind, height, k)
    return Case(random_bf16(rng, rows, k), exact, weight, random_bf16(rng, rows, n), random_bf16(rng, k))


def random_weight(
    gpu: Gpu, rng: np.random.Generator, kind: WeightKind, n: int, k: int
) -> tuple[Weight, np.ndarray]:
    """A weight [n, k] of elements about 1 / √k on the device, and what it stands for in float64."""
    if kind is WeightKind.BF16:
        values = random_bf16(rng, n, k, scale=k**-0.5)
        return gpu.upload(values), values.astype(np.float64)
    if kind is WeightKind.FP8:
        codes = np.clip(rng.standard_normal((n, k)) * 50, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        scale = (rng.uniform(0.5, 1.5, n) / 50 * k**-0.5).astype(np.float32)
        return Fp8Rows(gpu.upload(codes), gpu.upload(scale)), codes.astype(np.float64) * scale[:, None]
    quants = rng.integers(0, 16, (n, k), dtype=np.uint8)
    scales = (rng.standard_normal((n, k // 32)) * 0.2 * k**-0.5).astype(np.float16)
    words, tile_scales = q4_tiles(quants, scales)
    exact = (quants.astype(np.float64) - 8) * np.repeat(scales.astype(np.float64), 32, axis=1)
    return Q4Tiles(gpu.upload(words), gpu.upload(tile_scales), n, k), exact


def q4_tiles(quants: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quants u8 0 … 15 [n, k] and scales f16 [n, k / 32] in the layout of Q4Tiles."""
    n, k = quants.shape
    columns = -(-k // 64)
    whole = np.full((n, columns * 64), 8, np.uint8)
    whole[:, :k] = quants
    steps = np.zeros((n, columns * 2), np.float16)
    steps[:, : k // 32] = scales
    # tile, high, row, column, block, quad, element → tile, column, row, quad, block, high, element
    elements = whole.reshape(n // 16, 2, 8, columns, 2, 4, 8).transpose(0, 3, 2, 5, 4, 1, 6)
    ordered = elements[..., [0, 2, 4, 6, 1, 3, 5, 7]].astype(np.uint32)
    words = np.bitwise_or.reduce(ordered << (4 * np.arange(8, dtype=np.uint32)), axis=-1)
    tile_scales = (
        steps.reshape(n // 16, 2, 8, columns, 2).transpose(0, 3, 2, 4, 1).reshape(n // 16, columns, 8, 4)
    )
    return (
        np.ascontiguousarray(words).view(np.uint8).reshape(n // 16, columns, 512),
        np.ascontiguousarray(tile_scales),
    )


@pytest.mark.parametrize("kind", list(WeightKind))
def test_unit_vectors(gpu: Gpu, kind: WeightKind) -> None:
    """Products with unit vectors give each weight back as it is, subnormal e4m3 included."""
    codes = np.arange(16 * 32, dtype=np.uint32).reshape(16, 32)
    weight: Weight
    if kind is WeightKind.FP8:
        values = (codes % 256).astype(np.uint8)
        values[values % 128 == 127] = 0  # NaN
        exact = values.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        weight = Fp8Rows(
            gpu.upload(values.view(ml_dtypes.float8_e4m3fn)), gpu.upload(np.ones(16, np.float32))
        )
    elif kind is WeightKind.Q4:
        scale = np.linspace(-2, 2, 16).astype(np.float16)[:, None]
        words, scales = q4_tiles((codes % 16).astype(np.uint8), scale)
        weight = Q4Tiles(gpu.upload(words), gpu.upload(scales), 16, 32)
        exact = (codes % 16 - 8.0) * scale.astype(np.float64)
    else:
        exact = (codes / 256).astype(BF16).astype(np.float64)
        weight = gpu.upload(exact.astype(BF16))
    rows = kind.max_rows
    for first in range(0, 32, rows):
        x = np.zeros((rows, 32), BF16)
        x[np.arange(rows), first + np.arange(rows)] = 1
        y: Tensor = gpu.empty((rows, 16), DType.F32)
        gpu.run(skinny_product(gpu.library, gpu.limits, x=gpu.upload(x), weight=weight, y=y))
        np.testing.assert_array_equal(gpu.download(y), exact[:, first : first + rows].T.astype(np.float32))
