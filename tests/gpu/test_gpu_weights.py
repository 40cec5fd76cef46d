"""Weights loaded onto the GPU against the checkpoint's own values, for every way they may be stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from cuda_support import Memory, needs_gpu, opened_device

from engine.checkpoint import open_checkpoint
from engine.cuda import weight_pieces
from engine.cuda.device import Device
from engine.cuda.loading import load_cuda_engine
from engine.cuda.memory import Arena, Layout
from engine.cuda.settings import CudaSettings
from engine.cuda.weight_loading import LoadReport, load_weights
from engine.cuda.weight_pieces import converting_units, reserve_staging
from engine.cuda.weights import device_weights, reserve_weights
from engine.errors import CheckpointError
from engine.interface import Sampling
from engine.options import EngineOptions, Precision
from kernels.compiler import default_cache_folder
from kernels.launch import KernelLibrary
from kernels.tensor import DType, Tensor
from scripts.make_tiny_checkpoint import make_tiny_checkpoint
from scripts.random_checkpoint import write_random_checkpoint
from scripts.tiny_gguf import write_gguf
from tests.parity.reference_driver import Driver
from tests.weight_tiers import GGUF_CONFIG, KINDS, StoredKind, assert_holds

pytestmark = needs_gpu
BF16 = ml_dtypes.bfloat16


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with opened_device() as device:
        yield device


def assert_loads(device: Device, path: Path, *, threads: int = 3) -> LoadReport:
    """Loads into a poisoned arena and compares every tensor."""
    memory = Memory(device)
    heard: list[float] = []
    with open_checkpoint(path) as checkpoint:
        layout = Layout()
        reserve_weights(checkpoint.config, layout)
        arena = Arena.allocate(layout, device)
        try:
            for weight in device_weights(checkpoint.config):
                memory.poison(arena.tensor(weight.name))
            report = load_weights(
                checkpoint, arena, device, threads=threads, progress=lambda stage, share: heard.append(share)
            )
            for weight in device_weights(checkpoint.config):
                stored = np.concatenate([checkpoint.tensor(part).to_float32() for part in weight.parts])
                loaded = memory.download(arena.tensor(weight.name))
                np.testing.assert_array_equal(loaded, stored.astype(BF16), err_msg=weight.name)
        finally:
            arena.close()
    assert heard == sorted(heard)
    assert heard[-1] == pytest.approx(1.0)
    return report


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_folders(device: Device, tmp_path: Path, family: str, dtype: str) -> None:
    folder = make_tiny_checkpoint(tmp_path, family=family, dtype=dtype, tied=family == "qwen3", shards=2)
    report = assert_loads(device, folder)
    assert report.converted == (() if dtype == "bf16" else (dtype,))


@pytest.mark.parametrize("quant", ["Q4_0", "Q8_0", "Q6_K"])
def test_gguf_is_expanded(device: Device, tmp_path: Path, quant: str) -> None:
    report = assert_loads(device, write_gguf(tmp_path / "tiny.gguf", GGUF_CONFIG, quant=quant))
    assert quant.lower() in report.converted


def test_weights_larger_than_the_staging_ring(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers are used many times over, and rows wider than one get a larger one."""
    monkeypatch.setattr(weight_pieces, "STAGING_BYTES", 100)
    folder = make_tiny_checkpoint(tmp_path, vocab_size=1000, layers=3, dtype="f16")
    assert_loads(device, folder, threads=4)


def test_a_reader_that_fails_ends_the_load(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise CheckpointError("the file has shrunk")

    monkeypatch.setattr(weight_pieces, "write_bf16", fail)
    folder = make_tiny_checkpoint(tmp_path)
    with open_checkpoint(folder) as checkpoint:
        layout = Layout()
        reserve_weights(checkpoint.config, layout)
        arena = Arena.allocate(layout, device)
        try:
            with pytest.raises(CheckpointError, match="shrunk"):
                load_weights(checkpoint, arena, device)
        finally:
            arena.close()


@pytest.fixture(scope="module", params=[Precision.Q4, Precision.FP8])
def tier(request: pytest.FixtureRequest, device: Device) -> Iterator[tuple[Precision, KernelLibrary]]:
    """A tier and the kernels that loading it needs."""
    library = KernelLibrary.build(
        converting_units(request.param), device.limits.arch, cache_folder=default_cache_folder()
    )
    yield request.param, library
    library.close()


@pytest.mark.parametrize("staging_bytes", [8 << 20, 5000])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_tiers_of_few_bits(
    device: Device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: StoredKind,
    staging_bytes: int,
    tier: tuple[Precision, KernelLibrary],
) -> None:
    """Bit for bit what the reference engine holds, whatever it is made of, in pieces of few rows too."""
    precision, library = tier
    memory = Memory(device)
    monkeypatch.setattr(weight_pieces, "STAGING_BYTES", staging_bytes)
    with open_checkpoint(kind.write(tmp_path)) as checkpoint:
        layout = Layout()
        reserve_weights(checkpoint.config, layout, precision)
        reserve_staging(checkpoint.config, layout, precision)
        arena = Arena.allocate(layout, device)
        try:
            memory.poison(Tensor(arena.address, (arena.bytes,), DType.U8))
            report = load_weights(checkpoint, arena, device, precision=precision, library=library, threads=3)
            assert_holds(
                checkpoint,
                arena,
                precision,
                lambda tensor: memory.download(Tensor(tensor.address, (tensor.bytes,), DType.U8)),
            )
        finally:
            arena.close()
    assert report.requantised == kind.requantised.get(precision, ())
    assert report.converted == kind.converted


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.Q4, Precision.FP8])
def test_loading_peaks_where_serving_stays_and_that_is_what_was_planned(
    tmp_path: Path, precision: Precision
) -> None:
    """Of 0.4 GB in bf16. Device memory, looked at again and again while weights load, products are tuned and
    graphs captured, never exceeds what the engine holds in the end by a tenth; and what it holds beside its
    arena after use, graphs above all, stays within the plan's allowances.
    """
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 3, "vocab_size": 8192}
    write_random_checkpoint(tmp_path, GGUF_CONFIG | sizes | {"head_dim": 64, "num_attention_heads": 32})
    options = EngineOptions(
        tmp_path, precision=precision, kv_pages=2000, max_sequence_length=512, max_sequences=4
    )
    settings = CudaSettings(prefill_sizes=(64, 8192), gemm_folder=None)
    with opened_device() as device:
        before = device.free_bytes()
        lows: list[int] = []
        engine = load_cuda_engine(options, lambda stage, share: lows.append(device.free_bytes()), settings)
        driver = Driver(engine)
        for slot in range(4):
            driver.start(slot, list(range(3, 203)), Sampling(temperature=0.7, seed=slot, logprobs=2))
        driver.prefill(0, 1, 2, 3)
        driver.decode(3)
        device.synchronize()
        held, plan = before - device.free_bytes(), engine.info.memory_plan
        arena = engine.parts.arena.bytes
        engine.close()
    assert before - min(lows) <= 1.1 * held
    assert arena == sum(plan.values()) - plan["graphs"] - plan["reserve"]
    assert held - arena <= plan["graphs"] + plan["reserve"]
