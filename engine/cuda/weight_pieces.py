"""Weights cut into pieces that fit a staging buffer, each with its way from the file to the device.

A piece is rows of one stored tensor. What its bytes are on the way, and whether a kernel turns them into the
target's form once they are on the device, follows from the stored type and the target. Opens no file and
starts no thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm, prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint import Checkpoint, TensorType
from engine.checkpoint.tensor import Tensor as StoredTensor
from engine.config import ModelConfig
from engine.cuda.memory import Arena, Layout
from engine.cuda.weight_conversion import row_scales, row_step, write_bf16
from engine.cuda.weights import Weight, device_weights, tensors_of
from engine.options import Precision
from engine.quantization import q4_0
from kernels import fp8, q4
from kernels.compiler import CompileUnit
from kernels.fp8 import Fp8Rows
from kernels.launch import KernelLibrary
from kernels.q4 import TILE_ROWS, Q4Tiles
from kernels.tensor import DType, Tensor

STAGING_BYTES = 8 << 20
"""Of one staging buffer, unless a block of rows needs more."""

_STAGING = "weight_staging"
_BF16 = DType.BF16.bytes


class PinnedBytes(Protocol):
    """Pinned memory that a piece is written into: a device.PinnedBuffer."""

    address: int

    def array(self, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> NDArray[Any]: ...


class CopyStream(Protocol):
    """A device.Stream."""

    handle: int

    def copy_to_device(self, target: int, source: int, size: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Converter:
    """What pieces need that change their form on the device."""

    library: KernelLibrary
    staging: Tensor
    """u8. One for all: copies and kernels follow one another on the copy stream, so that a piece is converted
    before the next overwrites it. A kernel takes a thirtieth of its piece's copy."""

    def staged(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """The staging buffer as a tensor. Raises ValueError if it is too small."""
        tensor = Tensor(self.staging.address, shape, dtype)
        if tensor.bytes > self.staging.bytes:
            raise ValueError(f"a piece of {tensor.bytes} B in {self.staging.bytes} B of staging")
        return tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a stored tensor, and where they go. This kind: to bf16 on the host, then to their place."""

    stored: StoredTensor
    start: int
    stop: int
    target: Weight
    """Of these rows: [stop − start, columns]."""

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def columns(self) -> int:
        return self.target.shape[1]

    @property
    def staged_bytes(self) -> int:
        """On the way."""
        return self.rows * self.row_bytes(self.columns)

    @property
    def device_bytes(self) -> int:
        """At the end of it."""
        return sum(tensor.bytes for tensor in tensors_of(self.target))

    @staticmethod
    def row_bytes(columns: int) -> int:
        """Of one row on the way."""
        return columns * _BF16

    def write(self, buffer: PinnedBytes) -> None:
        """Reads the rows and puts them into the buffer as they are to travel."""
        bits = buffer.array((self.rows, self.columns), np.uint16)
        write_bf16(self.stored, self.start, self.stop, bits)

    def send(self, stream: CopyStream, source: int, converter: Converter | None) -> None:
        """Enqueues what brings the written rows from pinned memory at `source` to the target."""
        assert isinstance(self.target, Tensor)
        stream.copy_to_device(self.target.address, source, self.staged_bytes)


@dataclass(frozen=True, slots=True)
class QuantisedPiece(Piece):
    """To bf16 on the host, quantised on the device."""

    def send(self, stream: CopyStream, source: int, converter: Converter | None) -> None:
        assert converter is not None
        staged = converter.staged((self.rows, self.columns), DType.BF16)
        stream.copy_to_device(staged.address, source, self.staged_bytes)
        if isinstance(self.target, Q4Tiles):
            q4.q4_quantise(converter.library, values=staged, tiles=self.target)(stream.handle)
        else:
            assert isinstance(self.target, Fp8Rows)
            fp8.quantise_rows(converter.library, x=staged, out=self.target)(stream.handle)


@dataclass(frozen=True, slots=True)
class RawQ4Piece(Piece):
    """GGUF's Q4_0 blocks as they are, put into tiles on the device: 0.56 bytes an element to copy."""

    @staticmethod
    def row_bytes(columns: int) -> int:
        return columns // q4_0.BLOCK * q4_0.BLOCK_BYTES

    def write(self, buffer: PinnedBytes) -> None:
        raw = buffer.array((self.rows, self.row_bytes(self.columns)), np.uint8)
        np.copyto(raw, self.stored.data[self.start : self.stop])

    def send(self, stream: CopyStream, source: int, converter: Converter | None) -> None:
        assert converter is not None
        assert isinstance(self.target, Q4Tiles)
        staged = converter.staged((self.rows, self.row_bytes(self.columns)), DType.U8)
        stream.copy_to_device(staged.address, source, self.staged_bytes)
        q4.q4_repack(converter.library, raw=staged, tiles=self.target)(stream.handle)


@dataclass(frozen=True, slots=True)
class Fp8Piece(Piece):
    """Published e4m3 as it is, its scale per row or per tensor spread over its rows."""

    @staticmethod
    def row_bytes(columns: int) -> int:
        return columns + DType.F32.bytes

    def write(self, buffer: PinnedBytes) -> None:
        values = buffer.array((self.rows, self.columns), np.uint8)
        np.copyto(values, self.stored.data[self.start : self.stop])
        scales = buffer.array((self.rows,), np.float32, values.nbytes)
        np.copyto(scales, row_scales(self.stored, self.start, self.stop))

    def send(self, stream: CopyStream, source: int, converter: Converter | None) -> None:
        assert isinstance(self.target, Fp8Rows)
        values, scale = self.target.values, self.target.scale
        stream.copy_to_device(values.address, source, values.bytes)
        stream.copy_to_device(scale.address, source + values.bytes, scale.bytes)


def pieces(checkpoint: Checkpoint, arena: Arena, precision: Precision = Precision.BF16) -> Iterator[Piece]:
    """All weights, cut to the size of a staging buffer."""
    for weight in device_weights(checkpoint.config, precision):
        target = weight.found_in(arena)
        row = 0
        for part in weight.parts:
            stored = checkpoint.tensor(part)
            rows = stored.shape[0]
            yield from cut(stored, target.rows(row, row + rows), STAGING_BYTES)
            row += rows


def cut(stored: StoredTensor, target: Weight, most_bytes: int) -> Iterator[Piece]:
    """Pieces of whole rows, none of more than most_bytes on the way unless a step of rows is.

    target: of the stored tensor's shape. A vector is one row.
    """
    matrix = target
    if isinstance(target, Tensor):
        matrix = target.view(len(stored.data), prod(target.shape) // len(stored.data))
    rows, columns = matrix.shape
    kind = _kind(stored, target)
    step = _step(row_step(stored), target)
    at_once = max(step, most_bytes // kind.row_bytes(columns) // step * step)
    for start in range(0, rows, at_once):
        stop = min(rows, start + at_once)
        yield kind(stored, start, stop, matrix.rows(start, stop))


def converting_units(precision: Precision) -> tuple[CompileUnit, ...]:
    """The kernels that loading weights in that tier needs."""
    if precision is Precision.Q4:
        return q4.UNITS
    return fp8.UNITS if precision is Precision.FP8 else ()


def reserve_staging(config: ModelConfig, layout: Layout, precision: Precision) -> None:
    """Reserves the device's staging buffer, where the tier needs one: 8 MiB, or the largest step of rows."""
    if precision is Precision.BF16:
        return
    block = config.weight_format.block
    step = lcm(block[0] if block else 1, TILE_ROWS)
    weights = device_weights(config, precision)
    widest = max(weight.shape[-1] for weight in weights if weight.precision is precision)
    layout.add("staging", _STAGING, (max(STAGING_BYTES, step * widest * _BF16),), DType.U8)


def staging_in(arena: Arena) -> Tensor:
    """What reserve_staging reserved. Raises KeyError if the tier needs none."""
    return arena.tensor(_STAGING)


def _kind(stored: StoredTensor, target: Weight) -> type[Piece]:
    if isinstance(target, Tensor):
        return Piece
    if isinstance(target, Q4Tiles):
        return RawQ4Piece if stored.type is TensorType.Q4_0 else QuantisedPiece
    is_ready = stored.type is TensorType.F8_E4M3 and stored.scale_block is None
    return Fp8Piece if is_ready else QuantisedPiece


def _step(rows: int, target: Weight) -> int:
    """Rows may be cut at multiples of this: whole blocks of a scale, and whole tiles."""
    return lcm(rows, TILE_ROWS) if isinstance(target, Q4Tiles) else rows
