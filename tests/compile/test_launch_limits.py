"""No product of few rows asks for a launch that a device refuses, whatever its shape, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any, cast

import pytest

from kernels import launch, q4_gemm, skinny, skinny_rows, skinny_stream
from kernels.compiler import ARCHITECTURES, compile_units, default_cache_folder
from kernels.device import DeviceLimits
from kernels.fp8 import Fp8Rows
from kernels.fused import Finish, FusedNorm
from kernels.launch import Kernel, KernelLibrary, Launch
from kernels.q4 import Q4Tiles, tile_shapes
from kernels.skinny import Weight, WeightKind, skinny_product
from kernels.tensor import DType, Tensor

H200 = DeviceLimits((9, 0), 132, 232448, 62914560)
A100 = DeviceLimits((8, 0), 108, 166912, 41943040)
B200 = DeviceLimits((10, 0), 148, 232448, 132644864)
RTX_3090 = DeviceLimits((8, 6), 82, 101376, 6291456)
DEVICES = {"h200": H200, "a100": A100, "b200": B200, "rtx3090": RTX_3090}
NARROW = (16, 48, 176, 576, 1024, 2048, 2112, 2128, 3072, 4096, 4224, 4240)
WIDE = (6144, 12288, 19232, 28672, 151936, 262144)
LENGTHS = (32, 96, 544, 576, 1024, 2048, 2080, 2560, 3040, 4096, 4128, 5120, 6144, 9728, 14336, 28672)
SHAPES = tuple(product((*NARROW, *WIDE), LENGTHS))
ROWS = range(1, skinny.MAX_ROWS + 1)


@dataclass
class FakeLibrary:
    """Hands out kernels that nobody can run, and remembers how much shared memory was set up for each."""

    allowed: dict[str, int] = field(default_factory=dict)

    def kernel(self, source: str, expression: str, *, dynamic_shared_bytes: int = 0) -> Kernel:
        self.allowed[expression] = max(dynamic_shared_bytes, self.allowed.get(expression, 0))
        return Kernel(expression, 1, True)


class Checker:
    """Takes launches and holds them against a device's limits."""

    def __init__(self, limits: DeviceLimits) -> None:
        self.limits = limits
        self.fake = FakeLibrary()
        self.library = cast("KernelLibrary", self.fake)
        self.launches = 0

    def check(self, made: Launch) -> None:
        grid, block = tuple(made._config.grid), tuple(made._config.block)
        shared, name = made._config.shared_bytes, made.kernel.name
        what = f"{name}: grid {grid}, block {block}, {shared} B"
        assert 1 <= grid[0] < 1 << 31, what
        assert 1 <= min(grid[1:]) <= max(grid[1:]) <= 65535, what
        assert block[1:] == (1, 1), what
        assert 32 <= block[0] <= 1024, what
        assert block[0] % 32 == 0, what
        assert shared <= self.limits.shared_bytes_per_block, what
        assert shared <= self.fake.allowed[name], what
        self.launches += 1


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_driver_launch", lambda: None)


def tensor(*shape: int, dtype: DType = DType.BF16) -> Tensor:
    return Tensor(4096, shape, dtype)


def weight_of(kind: WeightKind, n: int, k: int) -> Weight:
    if kind is WeightKind.FP8:
        return Fp8Rows(tensor(n, k, dtype=DType.E4M3), tensor(n, dtype=DType.F32))
    if kind is WeightKind.BF16:
        return tensor(n, k)
    quants, scales = tile_shapes(n, k).values()
    return Q4Tiles(tensor(*quants[0], dtype=quants[1]), tensor(*scales[0], dtype=scales[1]), n=n, k=k)


def height(finish: Finish, n: int) -> int:
    return 2 * n if finish is Finish.SWIGLU else n


def product_or_none(checker: Checker, **arguments: Any) -> Launch | None:
    """None where the wrapper says that the device has too little shared memory."""
    try:
        return skinny_product(checker.library, checker.limits, **arguments)
    except ValueError as error:
        if "of shared memory" not in str(error):
            raise
        return None


@pytest.mark.parametrize("variant", skinny_rows.VARIANTS, ids=lambda variant: variant.expression)
def test_streamed_rows_fit(variant: skinny_rows.RowsVariant) -> None:
    """Every variant, whether it would be picked or not."""
    checker = Checker(H200)
    for rows, (n, k) in product(ROWS, SHAPES):
        if k <= variant.shape.most_k:
            weight, x, y = tensor(height(variant.finish, n), k), tensor(rows, k), tensor(rows, n)
            checker.check(skinny_rows.skinny_rows(checker.library, H200, variant, x=x, weight=weight, y=y))
            split = variant.split(H200, rows, n, k)
            assert min(split.stages, split.batch) >= 1
    assert checker.launches >= 8 * 18 * 6


@pytest.mark.parametrize("variant", skinny_stream.VARIANTS, ids=lambda variant: variant.expression)
def test_a_streamed_row_fits(variant: skinny_stream.StreamVariant) -> None:
    checker = Checker(H200)
    for n, k in SHAPES:
        if k <= variant.shape.most_k:
            weight = weight_of(WeightKind.Q4, height(variant.finish, n), k)
            assert isinstance(weight, Q4Tiles)
            norm = FusedNorm(tensor(k), 1e-6) if variant.norm else None
            x, y = tensor(1, k), tensor(1, n, dtype=variant.out)
            stream = skinny_stream.skinny_stream
            checker.check(stream(checker.library, H200, variant, x=x, weight=weight, y=y, norm=norm))
    assert checker.launches >= 18 * 6


@pytest.mark.parametrize("limits", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("kind", list(WeightKind))
@pytest.mark.parametrize("finish", list(Finish))
def test_products_of_few_rows_fit(limits: DeviceLimits, kind: WeightKind, finish: Finish) -> None:
    """What is picked, of all that the wrapper picks from; the H200 has a kernel for every shape."""
    checker = Checker(limits)
    refused = 0
    for rows, (n, k) in product((rows for rows in ROWS if rows <= kind.max_rows), SHAPES):
        weight, x = weight_of(kind, height(finish, n), k), tensor(rows, k)
        for out, has_norm in skinny._FLAVOURS[finish]:
            if has_norm and rows > 1:
                continue
            norm, y = FusedNorm(tensor(k), 1e-6) if has_norm else None, tensor(rows, n, dtype=out)
            made = product_or_none(checker, x=x, weight=weight, y=y, finish=finish, norm=norm)
            if made is None:
                refused += 1
            else:
                checker.check(made)
    assert refused == 0 or limits is RTX_3090
    assert checker.launches > 10 * refused


@pytest.mark.parametrize("limits", [H200, A100, B200], ids=["h200", "a100", "b200"])
@pytest.mark.parametrize("finish", list(Finish))
def test_q4_products_fit(limits: DeviceLimits, finish: Finish) -> None:
    checker = Checker(limits)
    for rows, (n, k) in product((1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 4096), SHAPES):
        weight = weight_of(WeightKind.Q4, height(finish, n), k)
        assert isinstance(weight, Q4Tiles)
        x, y = tensor(rows, k), tensor(rows, n)
        made = q4_gemm.q4_gemm(checker.library, limits, x=x, weight=weight, y=y, finish=finish)
        checker.check(made)
        cluster = q4_gemm.pick_plan(limits, rows, n, k, finish).cluster
        assert cluster <= q4_gemm.MAX_CLUSTER
        assert made._config.grid[0] % cluster == 0


def test_a_variant_that_a_device_has_no_memory_for_is_refused() -> None:
    little = DeviceLimits((9, 0), 132, 48 << 10, 62914560)
    checker = Checker(little)
    rows_variant, one_row = skinny_rows.VARIANTS[-1], skinny.VARIANTS[0]
    x, y = tensor(8, 2048), tensor(8, 4096)
    weight = tensor(8192, 2048)
    with pytest.raises(ValueError, match=r"skinny_rows<.*B of shared memory for a block"):
        skinny_rows.skinny_rows(checker.library, little, rows_variant, x=x, weight=weight, y=y)
    weight_q4 = weight_of(one_row.kind, 4096, 28672)
    with pytest.raises(ValueError, match=r"skinny_product<.*B of shared memory for a block"):
        skinny_product(
            checker.library, little, x=tensor(1, 28672), weight=weight_q4, y=tensor(1, 4096), variant=one_row
        )
    assert not checker.fake.allowed


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_only_q4_gemm_has_static_shared_memory(arch: str) -> None:
    """So the others' dynamic share alone counts against a block's limit; 48 KB is the limit of static use."""
    units = (*skinny.UNITS, *skinny_rows.UNITS, *skinny_stream.UNITS, *q4_gemm.UNITS)
    for compiled in compile_units(units, arch, cache_folder=default_cache_folder()):
        for expression, resources in compiled.resources.items():
            most = 48 << 10 if expression.startswith("q4_gemm") else 0
            assert resources.static_shared_bytes <= most, expression
