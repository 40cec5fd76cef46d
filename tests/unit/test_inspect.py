"""What `inspect` reports of sound and of unsound models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from engine.config import AttentionSpec
from engine.errors import ModelError
from engine.inspect import inspect_model
from engine.options import Precision
from scripts.make_tiny_checkpoint import make_tiny_checkpoint
from scripts.random_checkpoint import write_safetensors
from scripts.tiny_gguf import write_gguf
from tests.parity.families import CASES, build_checkpoint


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_family_has_a_sound_report(case: object, tmp_path: Path) -> None:
    build_checkpoint(case, tmp_path)  # type: ignore[arg-type]
    report = inspect_model(tmp_path)
    stored = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert report.is_usable
    assert 4 * report.parameters == sum(report.stored_bytes.values())
    assert 0 < stored - 4 * report.parameters < 60_000
    assert report.bytes_by_precision["bf16"] == 2 * report.parameters
    assert report.bytes_by_precision["fp8"] < 2 * report.parameters
    assert report.bytes_by_precision["q4"] < 3 * report.parameters
    assert sum(len(group.layers) for group in report.groups) == report.config.n_layers
    assert report.config.family in report.render()
    assert "can be loaded" in report.render()


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_in_each_tier_are_those_on_a_gpu(tmp_path: Path, tied: bool) -> None:
    pytest.importorskip("cuda.bindings")
    from engine.cuda.weights import device_weights

    folder = make_tiny_checkpoint(tmp_path, family="qwen2", hidden=96, tied=tied)
    report = inspect_model(folder)
    for tier, size in report.bytes_by_precision.items():
        assert size == sum(weight.bytes for weight in device_weights(report.config, Precision(tier)))


def test_numbers_of_a_mixture(tmp_path: Path) -> None:
    case = next(c for c in CASES if c.id == "qwen3_5_moe-fused")
    build_checkpoint(case, tmp_path)
    report = inspect_model(tmp_path)
    expert = 3 * 24 * 64
    assert report.parameters - report.active_parameters == 3 * (6 - 4) * expert
    n_attention = sum(isinstance(layer.mixer, AttentionSpec) for layer in report.config.layers)
    assert report.kv_bytes_per_token == {
        "bf16": n_attention * 2 * 2 * 64 * 2,
        "fp8": n_attention * 2 * 2 * 64,
    }
    conv_dim = 2 * 2 * 16 + 4 * 24
    assert report.state_bytes_per_sequence == 4 * 2 * (4 * 16 * 24 + 3 * conv_dim)
    text = report.render()
    assert "layers 0–1" in text
    assert "deltanet 2 key × 16, 4 value × 24, conv 4; 4 of 6 experts × 24 silu, shared 40" in text


def test_gguf_bytes_by_type(tmp_path: Path) -> None:
    config = next(c for c in CASES if c.id == "llama-gqa7").config
    report = inspect_model(write_gguf(tmp_path / "x.gguf", config | {"intermediate_size": 96}, quant="F16"))
    assert list(report.stored_bytes) == ["f16", "f32"]
    assert report.stored_bytes["f32"] == 4 * 112 * (2 * 3 + 1)


def test_trouble_is_reported_not_raised(tmp_path: Path) -> None:
    case = next(c for c in CASES if c.id == "qwen3-gqa8")
    build_checkpoint(case, tmp_path)
    tensors = dict(load_file(tmp_path / "model.safetensors"))
    del tensors["model.norm.weight"]
    tensors["model.mystery"] = np.zeros(3, np.float32)
    tensors["visual.patch.weight"] = np.zeros(3, np.float32)
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    report = inspect_model(tmp_path)
    assert not report.is_usable
    assert report.missing == ("model.norm.weight",)
    assert report.unknown == ("model.mystery",)
    assert report.unused == ("visual.patch.weight",)
    assert len(report.problems) == 1
    text = report.render()
    for part in ("model.norm.weight", "model.mystery", "visual.patch.weight", "[2, 2]", "cannot be loaded"):
        assert part in text


def test_unsupported_models_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    with pytest.raises(ModelError, match="'BertModel' is not supported"):
        inspect_model(tmp_path)
