"""Checkpoints of every stored kind, and what their weights must be on the device, with a GPU or without."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from engine.checkpoint import Checkpoint
from engine.checkpoint.folder import read_folder_tensors
from engine.cuda.memory import Arena
from engine.cuda.weights import DeviceWeight, device_weights
from engine.options import Precision
from engine.quantization import fp8, q4_0
from engine.reference.holding import Holding
from kernels.tensor import Tensor
from scripts.make_tiny_checkpoint import make_tiny_checkpoint
from scripts.random_checkpoint import write_safetensors
from scripts.tiny_gguf import write_gguf
from tests.unit.cuda_twin_q4 import unpack

BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn
GGUF_CONFIG = {
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
BLOCK = (32, 48)
SCHEMES: dict[str, dict[str, Any]] = {
    "tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "row": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                "targets": ["Linear"],
            }
        },
    },
    "block": {"quant_method": "fp8", "weight_block_size": list(BLOCK)},
}

ReadBytes = Callable[[Tensor], np.ndarray]
"""A tensor's bytes, u8 [n], from wherever it lies."""


@dataclass(frozen=True)
class StoredKind:
    """A way to store a model, and what loading it has to say in each tier."""

    name: str
    write: Callable[[Path], Path]
    requantised: dict[Precision, tuple[str, ...]]
    """By tier, where there is something to say."""
    converted: tuple[str, ...] = ()
    """Types of what becomes bf16 in the tiers of few bits."""


def publish_fp8(folder: Path, scheme: str, **sizes: Any) -> Path:
    """A tiny checkpoint whose layers' matrices are e4m3 with scales per "tensor", "row" or "block"."""
    make_tiny_checkpoint(folder, **sizes)
    tensors: dict[str, np.ndarray] = {
        name: np.array(source.read()).view(BF16).reshape(source.shape)
        for name, source in read_folder_tensors(folder).items()
    }
    for name in [n for n in tensors if ".layers." in n and tensors[n].ndim == 2]:
        values = tensors[name].astype(np.float32)
        scale = _scales(values, scheme)
        full = scale
        if scheme == "block":
            full = np.kron(scale, np.ones(BLOCK, np.float32))[: values.shape[0], : values.shape[1]]
        tensors[name] = fp8.to_e4m3(values / full).view(E4M3)
        tensors[f"{name}_scale" if scheme == "row" else f"{name}_scale_inv"] = scale
    write_safetensors(folder / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": SCHEMES[scheme]}))
    return folder


def _scales(values: np.ndarray, scheme: str) -> np.ndarray:
    magnitudes = np.abs(values)
    if scheme == "tensor":
        return np.asarray(magnitudes.max() / 448, np.float32)
    if scheme == "row":
        return magnitudes.max(axis=1, keepdims=True) / np.float32(448)
    padded = np.zeros(
        [-(-size // step) * step for size, step in zip(values.shape, BLOCK, strict=True)], np.float32
    )
    padded[: values.shape[0], : values.shape[1]] = magnitudes
    rows, columns = (size // step for size, step in zip(padded.shape, BLOCK, strict=True))
    return padded.reshape(rows, BLOCK[0], columns, BLOCK[1]).max(axis=(1, 3)) / np.float32(448)


_BOTH = (Precision.Q4, Precision.FP8)
_FP8 = "f8_e4m3"
KINDS = (
    StoredKind("bf16", lambda folder: make_tiny_checkpoint(folder, family="qwen2", tied=True), {}),
    StoredKind("f32", lambda folder: make_tiny_checkpoint(folder, dtype="f32", hidden=96), {}, ("f32",)),
    StoredKind("fp8-tensor", lambda folder: publish_fp8(folder, "tensor"), {Precision.Q4: (_FP8,)}),
    StoredKind("fp8-row", lambda folder: publish_fp8(folder, "row", hidden=160), {Precision.Q4: (_FP8,)}),
    StoredKind("fp8-block", lambda folder: publish_fp8(folder, "block"), dict.fromkeys(_BOTH, (_FP8,))),
    StoredKind(
        "gguf-q4_0",
        lambda folder: write_gguf(folder / "tiny.gguf", GGUF_CONFIG, quant="Q4_0"),
        {Precision.FP8: ("q4_0",)},
        ("q4_0", "f32"),
    ),
    StoredKind(
        "gguf-q6_k",
        lambda folder: write_gguf(folder / "tiny.gguf", GGUF_CONFIG, quant="Q6_K"),
        dict.fromkeys(_BOTH, ("q6_k",)),
        ("q6_k", "f32"),
    ),
)  # fmt: skip


def assert_holds(checkpoint: Checkpoint, arena: Arena, precision: Precision, read: ReadBytes) -> None:
    """Every weight on the device is, bit for bit, what the reference engine holds in that tier."""
    holding = Holding(precision)
    for weight in device_weights(checkpoint.config, precision):
        is_matrix = len(weight.shape) == 2 and weight.name != "embedding.weight"
        take = holding.matrix if is_matrix else holding.plain
        wanted = np.concatenate([take(checkpoint.tensor(part)) for part in weight.parts])
        np.testing.assert_array_equal(_decoded(weight, arena, read), wanted, err_msg=weight.name)


def _decoded(weight: DeviceWeight, arena: Arena, read: ReadBytes) -> np.ndarray:
    parts = [read(arena.tensor(name)) for name in weight.tensors()]
    shapes = [shape for shape, _ in weight.tensors().values()]
    if weight.precision is Precision.Q4:
        quants, scales = parts[0].reshape(shapes[0]), parts[1].view(np.float16).reshape(shapes[1])
        return q4_0.dequantise(unpack(quants, scales, weight.shape[1]))
    if weight.precision is Precision.FP8:
        return fp8.dequantise_rows(fp8.Fp8Rows(parts[0].reshape(shapes[0]), parts[1].view(np.float32)))
    return parts[0].view(BF16).reshape(shapes[0]).astype(np.float32)
