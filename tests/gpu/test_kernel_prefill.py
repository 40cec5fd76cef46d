"""Prefill attention over pages against float64: ragged segments, prefixes, windows, bf16 and e4m3 pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import pytest
from kernel_support import (
    BF16,
    Gpu,
    PagedCase,
    assert_close,
    assert_untouched,
    attention_reference,
    random_bf16,
)

from kernels import attention_prefill as prefill
from kernels.tensor import DType, Tensor

pytestmark = pytest.mark.gpu
TOLERANCE = {"rtol": 2**-7, "atol": 4e-3}
"""Weights are rounded to bf16 before they meet the values: 2^−9 of the result, and its own rounding."""
E4M3 = ml_dtypes.float8_e4m3fn
RAGGED = [(0, 1), (0, 2), (0, 63), (64, 65), (37, 200), (500, 1), (0, 130), (1000, 17), (63, 64)]
HEADS = [(2, 2), (4, 2), (3, 1), (7, 1), (8, 1), (16, 1)]
Variant = prefill.PrefillVariant | prefill.HopperVariant


@dataclass
class Case:
    """segments: (start, length) each, of slots in random order, over pages that are NaN where none wrote."""

    rng: np.random.Generator
    segments: list[tuple[int, int]]
    n_heads: int
    n_kv_heads: int
    head_dim: int
    window: int | None = None
    pages: PagedCase = field(init=False)
    query: np.ndarray = field(init=False)
    slots: list[int] = field(init=False)
    scales: dict[str, np.ndarray] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        contexts = [start + length for start, length in self.segments]
        self.pages = PagedCase(self.rng, contexts, self.n_kv_heads, self.head_dim)
        self.query = random_bf16(self.rng, self.rows + 5, self.n_heads, self.head_dim)
        self.slots = [int(slot) for slot in self.rng.permutation(len(self.segments))]

    @property
    def rows(self) -> int:
        return sum(length for _, length in self.segments)

    @property
    def table(self) -> np.ndarray:
        table = np.empty_like(self.pages.block_table)
        table[self.slots] = self.pages.block_table
        return table

    def quantise(self) -> None:
        """The pages as e4m3 with power-of-two scales of their own, over many magnitudes; NaN stays NaN."""
        for letter, sequences in (("k", self.pages.keys), ("v", self.pages.values)):
            raw = getattr(self.pages, f"{letter}_pages").astype(np.float32)
            raw *= 2.0 ** self.rng.integers(-6, 1, raw.shape[:2])[:, :, None, None]
            largest = np.nan_to_num(np.abs(raw)).max(axis=(2, 3))
            scales = 2.0 ** np.ceil(np.log2(np.maximum(largest, 2.0**-20) / 448))
            values = (raw / scales[:, :, None, None]).astype(E4M3)
            setattr(self.pages, f"{letter}_pages", values)
            self.scales[f"{letter}_scales"] = scales.astype(np.float32)
            exact = values.astype(np.float32) * scales[:, :, None, None].astype(np.float32)
            for index, sequence in enumerate(sequences):
                whole = exact[self.pages.block_table[index, : -(-len(sequence) // 64)]]
                whole = whole.transpose(0, 2, 1, 3).reshape(-1, *sequence.shape[1:])
                sequence[:] = whole[: len(sequence)].astype(BF16)

    def run(self, gpu: Gpu, variant: Variant | None = None) -> np.ndarray:
        group = self.n_heads // self.n_kv_heads
        shape = variant or prefill.pick_variant(gpu.limits, self.head_dim)
        lengths, starts = [s[1] for s in self.segments], [s[0] for s in self.segments]
        tiles = prefill.tile_list(self.slots, lengths, starts, group, shape)
        grid = prefill.most_tiles(self.rows, len(self.segments), group, shape)
        assert len(tiles) <= grid
        padded = np.full((grid, prefill.TILE_INTS), -1, np.int32)
        padded[: len(tiles)] = tiles
        out = gpu.empty(self.query.shape, DType.BF16)
        scales: dict[str, Tensor] = {name: gpu.upload(array) for name, array in self.scales.items()}
        launch = prefill.attention_prefill(
            gpu.library,
            gpu.limits,
            query=gpu.upload(self.query),
            k_pages=gpu.upload(self.pages.k_pages),
            v_pages=gpu.upload(self.pages.v_pages),
            block_table=gpu.upload(self.table),
            tiles=gpu.upload(padded),
            n_tiles=gpu.upload(np.array([len(tiles)], np.int32)),
            out=out,
            scale=self.head_dim**-0.5,
            window=self.window,
            variant=variant,
            **scales,
        )
        gpu.run(launch)
        got = gpu.download(out)
        gpu.run(launch)
        assert (gpu.download(out).view(np.uint16) == got.view(np.uint16)).all(), "a second run differs"
        return got

    def check(self, got: np.ndarray) -> None:
        """Every row of short segments, some of long ones; rows past the segments are untouched."""
        assert_untouched("rows past the segments", got[self.rows :])
        first = 0
        for segment, (start, length) in enumerate(self.segments):
            some = {0, 1, length - 1, *self.rng.integers(0, length, 24).tolist()}
            for i in range(length) if length < 80 else sorted(some):
                want = attention_reference(
                    self.query[first + i],
                    self.pages.keys[segment],
                    self.pages.values[segment],
                    start + i,
                    self.head_dim**-0.5,
                    self.window,
                )
                assert_close(f"segment {segment}, row {i}", got[first + i], want, **TOLERANCE)
            assert np.isfinite(got[first : first + length].astype(np.float32)).all()
            first += length


def arm_of(gpu: Gpu, arm: str, head_dim: int) -> Variant:
    """What portable devices or Hopper would take; skips the test where this device cannot run it."""
    if arm == "portable":
        return prefill.pick_variant(gpu.limits, head_dim)
    variant = prefill.pick_hopper_variant(gpu.limits, head_dim, DType.BF16)
    return variant or pytest.skip("no wgmma arm for this device and head size")


@pytest.mark.parametrize("arm", ["portable", "wgmma"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 1, 100])
def test_prefill_ragged(
    gpu: Gpu, rng: np.random.Generator, arm: str, head_dim: int, heads: tuple[int, int], window: int | None
) -> None:
    case = Case(rng, RAGGED, *heads, head_dim, window)
    case.check(case.run(gpu, arm_of(gpu, arm, head_dim)))


@pytest.mark.parametrize("variant", prefill.VARIANTS, ids=lambda v: f"{v.head_dim}-{v.warps}-{v.parts}")
@pytest.mark.parametrize("window", [None, 100])
def test_prefill_variants(
    gpu: Gpu, rng: np.random.Generator, variant: prefill.PrefillVariant, window: int | None
) -> None:
    """Also those for smaller devices and other numbers of rows, which these launches would not pick."""
    if variant.shared_bytes + 2048 > gpu.limits.shared_bytes_per_block:
        pytest.skip("needs more shared memory than a block can have here")
    for heads in ((3, 1), (8, 2)):
        case = Case(rng, RAGGED, *heads, variant.head_dim, window)
        case.check(case.run(gpu, variant))
        case.quantise()
        case.check(case.run(gpu, variant))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(2, 2), (7, 1), (16, 1)])
@pytest.mark.parametrize("window", [None, 1, 100])
def test_prefill_e4m3(
    gpu: Gpu, rng: np.random.Generator, head_dim: int, heads: tuple[int, int], window: int | None
) -> None:
    case = Case(rng, RAGGED, *heads, head_dim, window)
    case.quantise()
    case.check(case.run(gpu))


def test_every_e4m3_is_read_exactly(gpu: Gpu, rng: np.random.Generator) -> None:
    """One key a row sees: its value is the result, also subnormals and both ends of the scales' range."""
    finite = np.arange(256, dtype=np.uint8)
    finite = finite[np.isfinite(finite.view(E4M3).astype(np.float32))]
    for exponent in (-32, 0, 30):
        case = Case(rng, [(0, 64)], 1, 1, 64, window=1)
        case.quantise()
        values = np.resize(finite, case.pages.v_pages.shape).view(E4M3)
        case.pages.v_pages = values
        case.scales["v_scales"][:] = 2.0**exponent
        got = case.run(gpu)
        page = case.pages.block_table[0, 0]
        want = values[page, 0].astype(np.float32) * np.float32(2.0**exponent)
        assert (got[:64, 0].astype(np.float32) == want).all()


@pytest.mark.parametrize("arm", ["portable", "wgmma"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 1024])
def test_prefill_long(
    gpu: Gpu, rng: np.random.Generator, arm: str, head_dim: int, window: int | None
) -> None:
    case = Case(rng, [(0, 4097), (3000, 300), (0, 2000)], 4, 2, head_dim, window)
    case.check(case.run(gpu, arm_of(gpu, arm, head_dim)))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prefill_takes_an_arm_itself(gpu: Gpu, rng: np.random.Generator, head_dim: int) -> None:
    case = Case(rng, [(0, 2000), (700, 65)], 4, 2, head_dim)
    case.check(case.run(gpu))
    case.quantise()
    case.check(case.run(gpu))


def test_more_tiles_than_blocks_that_stay(gpu: Gpu, rng: np.random.Generator) -> None:
    """Several rounds of tiles a block, an odd number of them, with tiles of every length."""
    segments = [(int(rng.integers(0, 300)), int(rng.integers(1, 400))) for _ in range(90)]
    case = Case(rng, segments, 16, 4, 128)
    case.check(case.run(gpu, arm_of(gpu, "wgmma", 128)))
