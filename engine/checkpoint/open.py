"""Opens a model on disk, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.folder import read_folder_config, read_folder_tensors
from engine.checkpoint.gguf_file import GgufFile
from engine.checkpoint.gguf_finder import GgufFinder
from engine.checkpoint.gguf_parts import read_gguf_parts
from engine.checkpoint.hf_finder import HfFinder
from engine.checkpoint.resolve import Resolution, resolve
from engine.checkpoint.scales import read_plain
from engine.checkpoint.tensor import SourceTensor
from engine.config import ModelConfig
from engine.config.gguf import model_config_from_gguf
from engine.config.hugging_face import family_named
from engine.errors import CheckpointError
from engine.quantization.tensor_type import TensorType


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's configuration and what its files have for it, usable or not."""

    path: Path
    config: ModelConfig
    sources: Mapping[str, SourceTensor]
    resolution: Resolution


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a Hugging Face folder or a .gguf file. No weight is read yet.

    Raises ConfigError for a configuration that is malformed or not supported, CheckpointError for
    weights that are missing, malformed, of the wrong shape or type, or unaccounted for.
    """
    files = open_files(path)
    files.resolution.raise_if_unusable(path)
    loaders = {name: found.load for name, found in files.resolution.found.items()}
    return Checkpoint(Path(path), files.config, loaders, tuple(files.resolution.unused))


def open_files(path: Path) -> ModelFiles:
    """As open_checkpoint(), but weights that do not fit are reported, not refused."""
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.suffix.lower() != ".gguf":
        raise CheckpointError(f"{path} is neither a model folder nor a .gguf file")
    return _open_gguf(path)


def _open_folder(path: Path) -> ModelFiles:
    config = read_folder_config(path)
    sources = read_folder_tensors(path)
    finder = HfFinder(config, sources, family_named(config.family).tensor_names)
    if config.tied_embeddings and finder.head is not None:
        is_repeated = _is_same(sources[finder.embedding], sources[finder.head])
        config = replace(config, tied_embeddings=is_repeated)
    return ModelFiles(path, config, sources, resolve(config, sources, finder))


def _open_gguf(path: Path) -> ModelFiles:
    file = read_gguf_parts(path)
    config = model_config_from_gguf(
        file.metadata,
        tensor_shapes={name: tensor.shape for name, tensor in file.tensors.items()},
        frequency_factors=_frequency_factors(file),
        where=path.name,
    )
    return ModelFiles(
        path, config, file.tensors, resolve(config, file.tensors, GgufFinder(config, file.tensors))
    )


def _frequency_factors(file: GgufFile) -> tuple[float, ...]:
    """Rope divisors that the file brings along as a tensor."""
    source = file.tensors.get("rope_freqs.weight")
    if source is None:
        return ()
    if source.type is not TensorType.F32:
        raise CheckpointError(f"{file.path}: rope_freqs.weight must be F32, not {source.type}")
    return tuple(float(value) for value in read_plain(source))


def _is_same(one: SourceTensor, other: SourceTensor) -> bool:
    """Whether a stored head only repeats the embedding; where it does not, it counts."""
    if one.shape != other.shape or one.type != other.type:
        return False
    return bool(np.array_equal(one.read(), other.read()))
