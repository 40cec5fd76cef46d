"""q4_0 tiles bit for bit against their definition, and products with them against float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from kernel_support import Gpu, assert_close, random_bf16

from engine.quantization.q4_0 import Q4Rows, dequantise, quantise
from kernels.q4 import Q4Tiles, q4_dequantise, q4_quantise, q4_repack, tile_shapes
from kernels.q4_gemm import MAX_CLUSTER, VARIANTS, Q4GemmPlan, Q4GemmVariant, pick_plan, q4_gemm
from kernels.skinny import Finish
from kernels.tensor import DType
from tests.unit import cuda_twin_q4 as twin

pytestmark = pytest.mark.gpu
BF16 = ml_dtypes.bfloat16
SHAPES = [(16, 32), (48, 96), (64, 160), (576, 576), (1536, 2048), (176, 8256)]
OUTPUTS = [
    (Finish.STORE, DType.BF16),
    (Finish.STORE, DType.F32),
    (Finish.ADD, DType.BF16),
    (Finish.ADD, DType.F32),
    (Finish.SWIGLU, DType.BF16),
]


def empty_tiles(gpu: Gpu, n: int, k: int) -> Q4Tiles:
    """Poisoned."""
    return Q4Tiles(**{name: gpu.empty(*what) for name, what in tile_shapes(n, k).items()}, n=n, k=k)


def upload_tiles(gpu: Gpu, rows: Q4Rows) -> Q4Tiles:
    quants, scales = (gpu.upload(part) for part in twin.pack(rows))
    return Q4Tiles(quants, scales, *rows.shape)


def assert_same_tiles(gpu: Gpu, tiles: Q4Tiles, wanted: Q4Rows) -> None:
    quants, scales = twin.pack(wanted)
    np.testing.assert_array_equal(gpu.download(tiles.quants), quants)
    np.testing.assert_array_equal(gpu.download(tiles.scales).view(np.uint16), scales.view(np.uint16))


def hard_values(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    """bf16 with what quantising can stumble over: ties, zeros, tiny and huge blocks."""
    values = rng.standard_normal((n, k), np.float32) * np.exp2(rng.integers(-12, 4, (n, 1))).astype(
        np.float32
    )
    values[1, :32] = 0
    values[2, :32] = np.where(np.arange(32) % 2, -0.0, 0.0)
    values[3, :32] = np.where(np.arange(32) % 3, 1.5, -1.5)
    values[4, :32] = rng.integers(-8, 8, 32)
    values[5, :32] *= np.float32(1e-39)
    values[6, :32] = 2e6
    values[7, 5:32] = np.float32(1e-6)
    return values.astype(BF16)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_q4_quantise(gpu: Gpu, rng: np.random.Generator, n: int, k: int) -> None:
    values = hard_values(rng, n, k)
    tiles = empty_tiles(gpu, n, k)
    gpu.run(q4_quantise(gpu.library, values=gpu.upload(values), tiles=tiles))
    assert_same_tiles(gpu, tiles, quantise(values.astype(np.float32)))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_q4_repack_by_parts(gpu: Gpu, rng: np.random.Generator, n: int, k: int) -> None:
    rows = quantise(hard_values(rng, n, k).astype(np.float32))
    tiles = empty_tiles(gpu, n, k)
    middle = n // 32 * 16
    for start, stop in ((0, middle), (middle, n)):
        if start < stop:
            raw = gpu.upload(rows.data[start:stop])
            gpu.run(q4_repack(gpu.library, raw=raw, tiles=tiles.rows(start, stop)))
    assert_same_tiles(gpu, tiles, rows)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_q4_dequantise(gpu: Gpu, rng: np.random.Generator, n: int, k: int) -> None:
    rows = quantise(rng.standard_normal((n, k), np.float32))
    out = gpu.empty((n, k), DType.BF16)
    gpu.run(q4_dequantise(gpu.library, tiles=upload_tiles(gpu, rows), out=out))
    np.testing.assert_array_equal(
        gpu.download(out).view(np.uint16), dequantise(rows).astype(BF16).view(np.uint16)
    )


class Product:
    """One product's operands on the device and its exact result."""

    def __init__(self, gpu: Gpu, rng: np.random.Generator, rows: int, n: int, k: int, finish: Finish) -> None:
        height = 2 * n if finish is Finish.SWIGLU else n
        weight = quantise(rng.standard_normal((height, k), np.float32) / np.float32(np.sqrt(k)))
        x = random_bf16(rng, rows, k)
        self.finish = finish
        self.before = random_bf16(rng, rows, n)
        self.x, self.weight = gpu.upload(x), upload_tiles(gpu, weight)
        self.exact = x.astype(np.float64) @ dequantise(weight).astype(np.float64).T
        if finish is Finish.ADD:
            self.exact = self.exact + self.before.astype(np.float64)
        if finish is Finish.SWIGLU:
            gate, up = np.split(self.exact, 2, axis=1)
            self.exact = gate / (1 + np.exp(-gate)) * up

    def run(self, gpu: Gpu, out: DType, plan: Q4GemmPlan | None = None) -> np.ndarray:
        y = gpu.empty(self.exact.shape, out)
        if self.finish is Finish.ADD:
            gpu.write(y, self.before.astype(BF16 if out is DType.BF16 else np.float32))
        launch = q4_gemm(
            gpu.library, gpu.limits, x=self.x, weight=self.weight, y=y, finish=self.finish, plan=plan
        )
        gpu.run(launch)
        return gpu.download(y)

    def check(self, name: str, found: np.ndarray) -> None:
        """A weight is rounded twice, each time by up to 2^−8 of it and 1.6e-3 in the mean; so is a bf16 y."""
        atol = 3e-2 if self.finish is Finish.SWIGLU else 1.5e-2
        assert_close(name, found, self.exact, rtol=2**-6, atol=atol)
        error = found.astype(np.float64) - self.exact
        assert np.linalg.norm(error) <= 5e-3 * np.linalg.norm(self.exact)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 65, 150])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_q4_gemm_rows(gpu: Gpu, rng: np.random.Generator, n: int, k: int, rows: int) -> None:
    product = Product(gpu, rng, rows, n, k, Finish.STORE)
    plan = pick_plan(gpu.limits, rows, n, k, Finish.STORE)
    found = product.run(gpu, DType.F32)
    product.check(str(plan), found)
    np.testing.assert_array_equal(product.run(gpu, DType.F32), found)


@pytest.mark.parametrize(("finish", "out"), OUTPUTS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.expression)
def test_q4_gemm_variants(
    gpu: Gpu, rng: np.random.Generator, variant: Q4GemmVariant, finish: Finish, out: DType
) -> None:
    rows, n, k = variant.columns - 3, 848, 1056
    product = Product(gpu, rng, rows, n, k, finish)
    has_clusters = gpu.limits.compute_capability >= (9, 0)
    for cluster in (1, 2, 3, 4, 6, MAX_CLUSTER) if has_clusters else (1,):
        plan = Q4GemmPlan(variant, cluster)
        found = product.run(gpu, out, plan)
        product.check(str(plan), found)
        np.testing.assert_array_equal(product.run(gpu, out, plan), found)


def test_rows_do_not_depend_on_their_neighbours(gpu: Gpu, rng: np.random.Generator) -> None:
    product = Product(gpu, rng, 30, 256, 512, Finish.STORE)
    plan = pick_plan(gpu.limits, 30, 256, 512, Finish.STORE)
    found = product.run(gpu, DType.F32, plan)
    y = gpu.empty((2, 256), DType.F32)
    gpu.run(q4_gemm(gpu.library, gpu.limits, x=product.x.rows(8, 10), weight=product.weight, y=y, plan=plan))
    np.testing.assert_array_equal(gpu.download(y), found[8:10])
