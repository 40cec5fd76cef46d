"""Weights on their way to the device, into host memory instead: layout, merging, conversion, pieces."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings")

from engine.checkpoint import Checkpoint, open_checkpoint
from engine.checkpoint.tensor import Tensor as StoredTensor
from engine.config import AttentionSpec, DenseSpec, expected_tensors
from engine.cuda import weight_pieces
from engine.cuda.memory import Arena, Layout
from engine.cuda.weight_conversion import round_to_bf16, write_bf16
from engine.cuda.weight_loading import LoadReport, load_weights
from engine.cuda.weight_pieces import cut, pieces, reserve_staging
from engine.cuda.weights import PART, device_weights, reserve_weights, weights_in
from engine.errors import UnsupportedModelError
from engine.options import Precision
from engine.quantization.tensor_type import TensorType
from kernels.fp8 import Fp8Rows
from kernels.q4 import Q4Tiles
from kernels.tensor import DType, Tensor
from scripts.make_tiny_checkpoint import make_tiny_checkpoint
from tests.parity.families import CASES, Case, build_checkpoint
from tests.unit.cuda_twin import HostDevice, HostLibrary, load_twin
from tests.weight_tiers import KINDS, StoredKind, assert_holds

__all__ = ["load_twin"]

BF16 = ml_dtypes.bfloat16
DENSE = ("llama-", "mistral-", "mistral3-", "qwen2-", "qwen2_5_vl-", "qwen3-", "smollm3-", "gemma4-")


@contextmanager
def host_arena(checkpoint: Checkpoint) -> Iterator[Arena]:
    """An arena in host memory, filled with NaN."""
    layout = Layout()
    reserve_weights(checkpoint.config, layout)
    assert list(layout.bytes_by_part()) == [PART]
    block = np.full(layout.bytes + 256, 0xFF, np.uint8)
    address = block.ctypes.data
    yield Arena(layout, address + -address % 256)


def fill(checkpoint: Checkpoint, arena: Arena) -> None:
    """What load_weights does, without a device."""
    for piece in pieces(checkpoint, arena):
        bits = np.empty(piece.target.shape, np.uint16)
        write_bf16(piece.stored, piece.start, piece.stop, bits)
        ctypes.memmove(piece.target.address, bits.ctypes.data, piece.target.bytes)


def read(tensor: Tensor) -> np.ndarray:
    raw = (ctypes.c_uint8 * tensor.bytes).from_address(tensor.address)
    return np.frombuffer(raw, BF16).reshape(tensor.shape).astype(np.float32)


def stored_as_bf16(checkpoint: Checkpoint, *names: str) -> np.ndarray:
    """By the casts of ml_dtypes, which loading does not use."""
    return (
        np.concatenate([checkpoint.tensor(name).to_float32() for name in names])
        .astype(BF16)
        .astype(np.float32)
    )


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_arrives_where_the_forward_pass_looks(
    tmp_path: Path, family: str, dtype: str, tied: bool
) -> None:
    folder = make_tiny_checkpoint(
        tmp_path, family=family, dtype=dtype, tied=tied, heads=6, kv_heads=2, head_dim=32
    )
    with open_checkpoint(folder) as checkpoint, host_arena(checkpoint) as arena:
        fill(checkpoint, arena)
        weights = weights_in(arena, checkpoint.config)
        np.testing.assert_array_equal(read(weights.embedding), stored_as_bf16(checkpoint, "embedding.weight"))
        np.testing.assert_array_equal(read(weights.head), stored_as_bf16(checkpoint, "head.weight"))
        assert (weights.head.address == weights.embedding.address) == tied
        for index, layer in enumerate(weights.layers):
            prefix = f"layers.{index}."
            attention = f"{prefix}attention."
            np.testing.assert_array_equal(
                read(layer.mixer.qkv.weight),
                stored_as_bf16(checkpoint, *(f"{attention}{name}.weight" for name in "qkv")),
            )
            assert (layer.mixer.qkv.bias is not None) == (family == "qwen2")
            if layer.mixer.qkv.bias is not None:
                biases = stored_as_bf16(checkpoint, *(f"{attention}{name}.bias" for name in "qkv"))
                np.testing.assert_array_equal(read(layer.mixer.qkv.bias), biases)
            assert (layer.mixer.q_norm is not None) == (family == "qwen3")
            np.testing.assert_array_equal(
                read(layer.feed_forward.gate_up.weight),
                stored_as_bf16(
                    checkpoint, f"{prefix}feed_forward.gate.weight", f"{prefix}feed_forward.up.weight"
                ),
            )
            np.testing.assert_array_equal(
                read(layer.feed_forward_norm), stored_as_bf16(checkpoint, f"{prefix}feed_forward_norm.weight")
            )


@pytest.mark.parametrize("case", [c for c in CASES if c.id.startswith(DENSE)], ids=lambda case: case.id)
def test_no_weight_of_a_dense_family_is_left_out(case: Case, tmp_path: Path) -> None:
    """All tensors the configuration expects go to the device once, and nothing there stays unset."""
    config = build_checkpoint(case, tmp_path)
    if any(
        not isinstance(layer.mixer, AttentionSpec) or not isinstance(layer.feed_forward, DenseSpec)
        for layer in config.layers
    ):
        pytest.skip("not a dense model after all")
    with open_checkpoint(tmp_path) as checkpoint, host_arena(checkpoint) as arena:
        used = [part for weight in device_weights(checkpoint.config) for part in weight.parts]
        assert used == list(dict.fromkeys(used))
        assert set(used) == set(expected_tensors(checkpoint.config))
        fill(checkpoint, arena)
        for weight in device_weights(checkpoint.config):
            assert np.isfinite(read(arena.tensor(weight.name))).all(), weight.name


@pytest.mark.parametrize(
    "case", [c for c in CASES if "moe" in c.family or c.family == "qwen3_5"], ids=lambda c: c.id
)
def test_layers_without_a_layout_are_refused_by_name(case: Case, tmp_path: Path) -> None:
    config = build_checkpoint(case, tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"moe|deltanet"):
        device_weights(config)


@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=64))
def test_rounding_is_to_the_nearest_even(values: list[float]) -> None:
    wanted = np.array(values, np.float32)
    with np.errstate(all="ignore"):
        oracle = wanted.astype(BF16)
    bits = np.empty(len(values), np.uint16)
    round_to_bf16(wanted.copy(), bits)
    np.testing.assert_array_equal(np.isnan(bits.view(BF16)), np.isnan(oracle))
    is_number = ~np.isnan(oracle)
    np.testing.assert_array_equal(bits[is_number], oracle.view(np.uint16)[is_number])


@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 40),
    most_bytes=st.integers(1, 500),
    block=st.sampled_from([None, (1, 1), (8, 16), (16, 8)]),
)
def test_pieces_cover_each_row_once_and_carry_their_scales(
    rows: int, columns: int, most_bytes: int, block: tuple[int, int] | None
) -> None:
    rng = np.random.default_rng(rows * 1000 + columns)
    values = rng.standard_normal((rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    scale_shape = (rows, 1) if block is None else (-(-rows // block[0]), -(-columns // block[1]))
    stored = StoredTensor(
        "w", TensorType.F8_E4M3, (rows, columns), values.view(np.uint8),
        rng.standard_normal(scale_shape).astype(np.float32), block,
    )  # fmt: skip
    result = np.full((rows, columns), 0xFFFF, np.uint16)
    target = Tensor(result.ctypes.data, (rows, columns), DType.BF16)
    next_row = 0
    for piece in cut(stored, target, most_bytes):
        assert piece.start == next_row
        next_row = piece.stop
        bits = np.empty(piece.target.shape, np.uint16)
        write_bf16(piece.stored, piece.start, piece.stop, bits)
        ctypes.memmove(piece.target.address, bits.ctypes.data, piece.target.bytes)
    assert next_row == rows
    np.testing.assert_array_equal(result.view(BF16), stored.to_float32().astype(BF16))


def loaded(checkpoint: Checkpoint, precision: Precision) -> tuple[Arena, HostDevice, LoadReport]:
    """Everything in a poisoned arena on the host, by the kernels' twins."""
    device, layout = HostDevice(), Layout()
    reserve_weights(checkpoint.config, layout, precision)
    reserve_staging(checkpoint.config, layout, precision)
    arena = Arena.allocate(layout, device)
    library = None if precision is Precision.BF16 else HostLibrary()
    heard: list[float] = []
    report = load_weights(
        checkpoint,
        arena,
        device,  # type: ignore[arg-type]
        precision=precision,
        library=library,  # type: ignore[arg-type]
        threads=3,
        progress=lambda stage, share: heard.append(share),
    )
    if library is not None:
        library.close()
    assert heard == sorted(heard)
    assert heard[-1] == pytest.approx(1.0)
    return arena, device, report


def bytes_at(tensor: Tensor) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * tensor.bytes).from_address(tensor.address), np.uint8)


@pytest.mark.usefixtures("load_twin")
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.Q4, Precision.FP8])
@pytest.mark.parametrize("staging_bytes", [1 << 20, 2000])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_tier_holds_what_the_reference_engine_multiplies_by(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: StoredKind,
    staging_bytes: int,
    precision: Precision,
) -> None:
    """In pieces of a few rows too, and rows that no staging buffer was made for."""
    monkeypatch.setattr(weight_pieces, "STAGING_BYTES", staging_bytes)
    with open_checkpoint(kind.write(tmp_path)) as checkpoint:
        arena, device, report = loaded(checkpoint, precision)
        assert_holds(checkpoint, arena, precision, bytes_at)
        arena.close()
        device.close()
    assert report.bytes == sum(weight.bytes for weight in device_weights(checkpoint.config, precision))
    if precision is not Precision.BF16:
        assert report.requantised == kind.requantised.get(precision, ())
        assert report.converted == kind.converted


def test_the_tier_shows_in_the_types_of_the_weights(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, tied=True)
    kinds = {Precision.BF16: Tensor, Precision.Q4: Q4Tiles, Precision.FP8: Fp8Rows}
    with open_checkpoint(folder) as checkpoint:
        config = checkpoint.config
        for precision, kind in kinds.items():
            layout = Layout()
            reserve_weights(config, layout, precision)
            weights = weights_in(Arena(layout, 1 << 20), config, precision)
            for layer in weights.layers:
                linears = layer.mixer.qkv, layer.mixer.o, layer.feed_forward.gate_up, layer.feed_forward.down
                assert {type(linear.weight) for linear in linears} == {kind}
            assert isinstance(weights.embedding, Tensor)
            assert isinstance(weights.head, Q4Tiles if precision is Precision.Q4 else Tensor)
            assert (weights.head is weights.embedding) == (precision is not Precision.Q4)


def test_loading_takes_a_fixed_buffer_beside_the_weights(tmp_path: Path) -> None:
    """So the peak is the final use and 8 MiB, which stay reserved."""
    with open_checkpoint(make_tiny_checkpoint(tmp_path)) as checkpoint:
        for precision, staged in ((Precision.BF16, 0), (Precision.Q4, 8 << 20), (Precision.FP8, 8 << 20)):
            layout = Layout()
            reserve_weights(checkpoint.config, layout, precision)
            reserve_staging(checkpoint.config, layout, precision)
            assert layout.bytes_by_part().get("staging", 0) == staged


def test_groups_name_what_weights_are_for(tmp_path: Path) -> None:
    with open_checkpoint(make_tiny_checkpoint(tmp_path, family="qwen2")) as checkpoint:
        groups = {weight.name: weight.group() for weight in device_weights(checkpoint.config)}
    assert set(groups.values()) == {"embedding", "attention", "feed-forward", "head", "norms"}
    assert groups["layers.1.feed_forward.down.weight"] == "feed-forward"
    assert groups["layers.0.attention.qkv.bias"] == groups["final_norm.weight"] == "norms"
