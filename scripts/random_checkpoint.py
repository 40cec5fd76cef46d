"""Writes Hugging Face folders with random weights for any supported configuration: no torch, no download.

A weight depends on the seed and its own name alone, so that every machine and every library makes the
same ones; their sizes are chosen so that activations stay near one and logits differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.naming import hf_name
from engine.config import ModelConfig, expected_tensors
from engine.config.hugging_face import family_named, model_config_from_hf

DTYPES = {
    "f32": (np.dtype(np.float32), "F32"),
    "f16": (np.dtype(np.float16), "F16"),
    "bf16": (np.dtype(ml_dtypes.bfloat16), "BF16"),
    "f8_e4m3": (np.dtype(ml_dtypes.float8_e4m3fn), "F8_E4M3"),
}
_SAFETENSORS_TYPES = dict(DTYPES.values())


def random_weight(
    name: str, shape: tuple[int, ...], seed: int, *, weight_offset: float = 0.0
) -> NDArray[np.float32]:
    """One tensor by canonical name, float32 of `shape`."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "little")))
    values = generator.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        offset = 0.0 if ".deltanet." in name else weight_offset
        return np.float32(1.0 - offset) + np.float32(0.2) * values
    if name.endswith(".scalar"):
        return np.float32(1.0) + np.float32(0.1) * values
    if name.endswith((".bias", ".dt_bias")):
        return np.float32(0.2) * values
    if name.endswith(".a_log"):
        return np.float32(0.5) * values
    if name == "embedding.weight":
        return np.float32(0.5) * values
    return values / np.float32(np.sqrt(shape[-1]))


def canonical_weights(config: ModelConfig, seed: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """All weights of a model by canonical name."""
    for name, shape in expected_tensors(config).items():
        yield name, random_weight(name, shape, seed, weight_offset=config.final_norm.weight_offset)


def write_safetensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Writes one .safetensors file; the arrays' dtypes must be among DTYPES."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, values in tensors.items():
        header[name] = {
            "dtype": _SAFETENSORS_TYPES[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [offset, offset + values.nbytes],
        }
        offset += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for values in tensors.values():
            file.write(np.ascontiguousarray(values).tobytes())


def write_random_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    *,
    seed: int = 0,
    dtype: str = "bf16",
    prefix: str = "model.",
    head_name: str = "lm_head.weight",
    fuse_experts: bool = False,
    shards: int = 1,
) -> ModelConfig:
    """Writes config.json and the weights of a model (no tokenizer) into an existing folder.

    `prefix` stands before all names but the head's. With several shards there is an index beside them.
    Fused experts are one [experts, 2 · intermediate, hidden] and one [experts, hidden, intermediate].
    """
    model = model_config_from_hf(config)
    own_names = family_named(model.family).tensor_names
    tensors: dict[str, NDArray[Any]] = {}
    for name, values in canonical_weights(model, seed):
        file_name = head_name if name == "head.weight" else prefix + hf_name(name, own_names)
        if name.endswith("conv.weight"):
            values = values[:, None, :]
        tensors[file_name] = values.astype(DTYPES[dtype][0])
    if fuse_experts:
        tensors = _fuse_experts(tensors)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_shards(folder, tensors, shards)
    return model


def _fuse_experts(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Stacks ….experts.E.{gate,up,down}_proj.weight, E from 0 on, under ….experts."""
    fused = {name: values for name, values in tensors.items() if ".experts." not in name}
    for name in tensors:
        stem, found, part = name.partition(".experts.0.")
        if not found:
            continue
        parts = [n for n in tensors if n.startswith(f"{stem}.experts.") and n.endswith(part)]
        if part.startswith("down"):
            fused[f"{stem}.experts.down_proj"] = np.stack([tensors[n] for n in parts])
        elif part.startswith("gate"):
            pairs = [(tensors[n], tensors[n.replace("gate_proj", "up_proj")]) for n in parts]
            fused[f"{stem}.experts.gate_up_proj"] = np.stack([np.concatenate(pair) for pair in pairs])
    return fused


def write_shards(folder: Path, tensors: Mapping[str, NDArray[Any]], shards: int) -> None:
    """One model.safetensors, or several and model.safetensors.index.json."""
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        write_safetensors(folder / file_name, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file_name)
    total = sum(values.nbytes for values in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
