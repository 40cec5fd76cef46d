"""Writes checkpoints of real models' shapes with random weights, in seconds: for measuring, not for answers.

    PYTHONPATH=. python scripts/gpu/make_random_checkpoint.py qwen3-8b /dev/shm/qwen3-8b [--layers 4]

Weights are bf16, normal with standard deviation 0.02, norms around 1. All are cut from one block of noise
whose length is prime, each tensor from another place, so that no two rows agree. The tokenizer knows 320
tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.naming import hf_name
from engine.config import expected_tensors
from engine.config.hugging_face import family_named, model_config_from_hf
from scripts.make_tiny_checkpoint import write_tokenizer

NOISE_ELEMENTS = 33_554_393
"""A prime, and 64 MiB of bf16: rows of any length start at ever other places of it."""
SPREAD = 0.02
NORM_SPREAD = 0.1
SHARD_BYTES = 5 << 30
_CHUNK_BYTES = 16 << 20

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-1.7b": _QWEN3
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}


@dataclass(frozen=True)
class Span:
    """Where a tensor lies in its file."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


def make_random_checkpoint(
    folder: Path, model: str, *, layers: int | None = None, threads: int | None = None
) -> Path:
    """Writes one of MODELS into `folder` (made if need be), with fewer layers if asked, and returns it.

    Raises KeyError for a model that is not among MODELS.
    """
    config = MODELS[model] | ({} if layers is None else {"num_hidden_layers": layers})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2})
    )
    write_tokenizer(folder, 320)
    _write_weights(folder, _tensors(config), threads or len(os.sched_getaffinity(0)))
    return folder


def _tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """All tensors by their names in the file."""
    model = model_config_from_hf(config)
    own = family_named(model.family).tensor_names
    return {
        "lm_head.weight" if name == "head.weight" else "model." + hf_name(name, own): shape
        for name, shape in expected_tensors(model).items()
    }


def _write_weights(folder: Path, tensors: Mapping[str, tuple[int, ...]], threads: int) -> None:
    """Shards of at most SHARD_BYTES, and their index."""
    noise = np.random.default_rng(1).standard_normal(NOISE_ELEMENTS, np.float32)
    blocks = {
        "weight": (noise * np.float32(SPREAD)).astype(ml_dtypes.bfloat16),
        "norm": (1 + noise[: 1 << 20] * np.float32(NORM_SPREAD)).astype(ml_dtypes.bfloat16),
    }
    shards = _shards(tensors)
    weight_map: dict[str, str] = {}
    with ExitStack() as open_files, ThreadPoolExecutor(threads) as pool:
        writes = []
        for number, shard in enumerate(shards, start=1):
            file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            weight_map |= dict.fromkeys((span.name for span in shard), file_name)
            descriptor, start = _begin_file(folder / file_name, shard)
            open_files.callback(os.close, descriptor)
            for span in shard:
                block = blocks["norm" if span.name.endswith("norm.weight") else "weight"]
                for first in range(0, span.elements, _CHUNK_BYTES // 2):
                    writes.append(pool.submit(_write_chunk, descriptor, start, span, first, block))
        for write in writes:
            write.result()
    total = 2 * sum(prod(shape) for shape in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tensors(folder: Path, config: Mapping[str, Any], values: Iterable[tuple[str, Any]]) -> None:
    """All tensors of a Hugging Face config, and their index, from (name in the file, leading rows in bf16).

    The rest of a tensor is a hole of the file: zeros that cost nothing. Raises ValueError if one is missing.
    """
    shards = _shards(_tensors(config))
    places: dict[str, tuple[int, int]] = {}
    weight_map: dict[str, str] = {}
    with ExitStack() as open_files:
        for number, shard in enumerate(shards, start=1):
            file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            weight_map |= dict.fromkeys((span.name for span in shard), file_name)
            descriptor, start = _begin_file(folder / file_name, shard)
            open_files.callback(os.close, descriptor)
            places |= {span.name: (descriptor, start + span.offset) for span in shard}
        for name, rows in values:
            descriptor, offset = places.pop(name)
            data = memoryview(np.ascontiguousarray(rows).view(np.uint8).reshape(-1))
            for first in range(0, len(data), _CHUNK_BYTES):
                os.pwrite(descriptor, data[first : first + _CHUNK_BYTES], offset + first)
    if places:
        raise ValueError(f"no values for {', '.join(sorted(places))}")
    total = 2 * sum(span.elements for shard in shards for span in shard)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _shards(tensors: Mapping[str, tuple[int, ...]]) -> list[list[Span]]:
    shards: list[list[Span]] = [[]]
    offset = 0
    for name, shape in tensors.items():
        size = 2 * prod(shape)
        if shards[-1] and offset + size > SHARD_BYTES:
            shards.append([])
            offset = 0
        shards[-1].append(Span(name, shape, offset))
        offset += size
    return shards


def _begin_file(path: Path, spans: list[Span]) -> tuple[int, int]:
    """(an open file of its full size, where the tensors' bytes begin)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for span in spans:
        end = span.offset + 2 * span.elements
        header[span.name] = {"dtype": "BF16", "shape": list(span.shape), "data_offsets": [span.offset, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    start = 8 + len(text)
    os.ftruncate(descriptor, start + spans[-1].offset + 2 * spans[-1].elements)
    os.pwrite(descriptor, len(text).to_bytes(8, "little") + text, 0)
    return descriptor, start


def _write_chunk(descriptor: int, start: int, span: Span, first: int, block: NDArray[Any]) -> None:
    """Elements first … of a tensor, out of the block from a place that its name decides."""
    count = min(_CHUNK_BYTES // 2, span.elements - first)
    place = int.from_bytes(hashlib.sha256(span.name.encode()).digest()[:8], "little") + first
    position = start + span.offset + 2 * first
    while count:
        begin = place % len(block)
        part = block[begin : begin + count].view(np.uint8)
        written = os.pwrite(descriptor, part.data, position) // 2
        count, place, position = count - written, place + written, position + 2 * written


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    began = time.perf_counter()
    folder = make_random_checkpoint(
        arguments.folder, arguments.model, layers=arguments.layers, threads=arguments.threads
    )
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    seconds = time.perf_counter() - began
    print(f"{folder}: {size / 1e9:.2f} GB in {seconds:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
