"""q4_0 weights as the kernels want them, and what fills such weights and reads them back (q4.cu).

Knows the layout, not the products that use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.compiler import CompileUnit
from kernels.launch import Argument, Dim3, Kernel, KernelLibrary, Launch, i32
from kernels.tensor import DType, Tensor, expect

SOURCE = "q4.cu"
_WARPS = 8
_PER_WARP = 4
"""Tiles that a warp of q4_dequantise has on their way at once."""
FILE_BLOCK_BYTES = 18
"""Of a q4_0 block in a GGUF file: f16 d, then 16 bytes of quants."""

UNITS = (CompileUnit(SOURCE, ("q4_quantise", "q4_repack", f"q4_dequantise<{_PER_WARP}>")),)

TILE_ROWS = 16
TILE_COLUMNS = 64
BLOCK = 32
"""Elements that share a scale."""
TILE_BYTES = TILE_ROWS * TILE_COLUMNS // 2
TILE_SCALES = TILE_ROWS * TILE_COLUMNS // BLOCK


def tile_columns(k: int) -> int:
    """Tiles along k: ⌈k / 64⌉."""
    return -(-k // TILE_COLUMNS)


@dataclass(frozen=True, slots=True)
class Q4Tiles:
    """A q4_0 weight [n, k] in tiles of 16 rows × 64 of k, laid out as fragments of tensor-core products.

    n is a multiple of 16, k of 32. Value = scale · (q − 8). A tile's bytes are 32 lanes × 4 words. Lane l
    has rows l/4 and l/4 + 8 of block 0, then of block 1; of each block elements 8·(l%4) … +7, in the order
    0, 2, 4, 6, 1, 3, 5, 7 from the low nibble up, so that (word >> 4·i) & 0x000F000F is the pair 2i, 2i + 1.
    If k % 64 = 32 the last tile's block 1 has scales of 0 and quants of 8.
    """

    quants: Tensor
    """u8 [n / 16, ⌈k / 64⌉, 512]."""
    scales: Tensor
    """f16 [n / 16, ⌈k / 64⌉, 8, 4]: at [.., l/4] those of lane l's four words."""
    n: int
    k: int

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        return self.n, self.k

    @property
    def bytes(self) -> int:
        return self.quants.bytes + self.scales.bytes

    def rows(self, start: int, stop: int) -> Q4Tiles:
        """Rows start … stop − 1, multiples of 16. Raises ValueError for others."""
        if start % TILE_ROWS or stop % TILE_ROWS:
            raise ValueError(f"rows {start} … {stop} of q4 tiles: multiples of {TILE_ROWS} only")
        first, last = start // TILE_ROWS, stop // TILE_ROWS
        return Q4Tiles(self.quants.rows(first, last), self.scales.rows(first, last), stop - start, self.k)


def tile_shapes(n: int, k: int) -> dict[str, tuple[tuple[int, ...], DType]]:
    """Shapes and types of the buffers of a weight [n, k], by field. Raises ValueError if it has none."""
    if n % TILE_ROWS or k % BLOCK or n <= 0 or k <= 0:
        raise ValueError(f"no q4 tiles of {n} × {k}: n must be a multiple of {TILE_ROWS}, k of {BLOCK}")
    tiles = (n // TILE_ROWS, tile_columns(k))
    return {"quants": ((*tiles, TILE_BYTES), DType.U8), "scales": ((*tiles, 8, 4), DType.F16)}


def q4_quantise(library: KernelLibrary, *, values: Tensor, tiles: Q4Tiles) -> Launch:
    """tiles = values in q4_0, bit for bit as engine/quantization/q4_0.py has it.

    values  bf16 [n, k], finite

    Raises ValueError for shapes that do not fit.
    """
    expect_tiles(SOURCE, "tiles", tiles)
    expect(SOURCE, "values", values, DType.BF16, (tiles.n, tiles.k))
    kernel = library.kernel(SOURCE, "q4_quantise")
    return _launch(kernel, tiles, 1, (values, tiles.quants, tiles.scales, i32(tiles.k)))


def q4_repack(library: KernelLibrary, *, raw: Tensor, tiles: Q4Tiles) -> Launch:
    """tiles = raw, in another order.

    raw  u8 [n, k / 32 · 18]: rows of a GGUF file's Q4_0

    Raises ValueError for shapes that do not fit.
    """
    expect_tiles(SOURCE, "tiles", tiles)
    expect(SOURCE, "raw", raw, DType.U8, (tiles.n, tiles.k // BLOCK * FILE_BLOCK_BYTES))
    kernel = library.kernel(SOURCE, "q4_repack")
    return _launch(kernel, tiles, 1, (raw, tiles.quants, tiles.scales, i32(tiles.k)))


def q4_dequantise(library: KernelLibrary, *, tiles: Q4Tiles, out: Tensor) -> Launch:
    """out = scale · (q − 8), rounded once. The launch right before must not have written the tiles.

    out  bf16 [n, k]

    Raises ValueError for shapes that do not fit.
    """
    expect_tiles(SOURCE, "tiles", tiles)
    expect(SOURCE, "out", out, DType.BF16, (tiles.n, tiles.k))
    kernel = library.kernel(SOURCE, f"q4_dequantise<{_PER_WARP}>")
    return _launch(kernel, tiles, _PER_WARP, (tiles.quants, tiles.scales, out, i32(tiles.k)))


def expect_tiles(kernel: str, name: str, tiles: Q4Tiles) -> None:
    """Raises ValueError unless both buffers have the shapes of its n and k."""
    shapes = tile_shapes(tiles.n, tiles.k)
    expect(kernel, f"{name}.quants", tiles.quants, DType.U8, shapes["quants"][0])
    expect(kernel, f"{name}.scales", tiles.scales, DType.F16, shapes["scales"][0])


def _launch(kernel: Kernel, tiles: Q4Tiles, per_warp: int, arguments: tuple[Argument, ...]) -> Launch:
    """A warp for `per_warp` tiles beside each other."""
    grid = Dim3(-(-tile_columns(tiles.k) // (_WARPS * per_warp)), tiles.n // TILE_ROWS)
    return Launch(kernel, grid, Dim3(_WARPS * 32), arguments)
