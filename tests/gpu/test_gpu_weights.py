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
from engine.cuda.memory import Arena, Layout
from engine.cuda.weight_loading import LoadReport, load_weights
from engine.cuda.weights import device_weights, reserve_weights
from engine.errors import CheckpointError
from scripts.make_tiny_checkpoint import make_tiny_checkpoint
from scripts.tiny_gguf import write_gguf

pytestmark = needs_gpu
BF16 = ml_dtypes.bfloat16
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


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
    report = assert_loads(device, write_gguf(tmp_path / "tiny.gguf", LLAMA, quant=quant))
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
