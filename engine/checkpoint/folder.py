"""A Hugging Face model folder: its configuration and its safetensors, single or sharded."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint.safetensors import read_safetensors
from engine.checkpoint.tensor import SourceTensor
from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.files.json_file import read_json_object

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def read_folder_config(folder: Path) -> ModelConfig:
    """From config.json. Raises ConfigError."""
    return ModelConfig.from_hf(read_json_object(folder / "config.json"))


def read_folder_tensors(folder: Path) -> dict[str, SourceTensor]:
    """All tensors of all shards by their names in the files. Raises CheckpointError."""
    if (folder / _INDEX).is_file():
        return _read_shards(folder)
    if (folder / _SINGLE).is_file():
        return read_safetensors(folder / _SINGLE)
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(others) == 1:
        return read_safetensors(folder / others[0])
    if others:
        raise CheckpointError(f"{folder} has {len(others)} safetensors files but no {_INDEX}")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise CheckpointError(f"{folder} has only pickled PyTorch weights; convert them to safetensors")
    raise CheckpointError(f"{folder} has no weights: neither {_SINGLE} nor {_INDEX}")


def _read_shards(folder: Path) -> dict[str, SourceTensor]:
    index_path = folder / _INDEX
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path} has no weight_map")
    tensors: dict[str, SourceTensor] = {}
    for shard in sorted({_shard_name(index_path, file) for file in weight_map.values()}):
        if not (folder / shard).is_file():
            raise CheckpointError(f"{folder} lacks the shard {shard} that {_INDEX} names")
        for name, tensor in read_safetensors(folder / shard).items():
            if name in tensors:
                raise CheckpointError(f"{folder}: tensor {name!r} stands in two shards, one of them {shard}")
            tensors[name] = tensor
    lost = [name for name in weight_map if name not in tensors]
    if lost:
        raise CheckpointError(
            f"{folder}: {len(lost)} tensors of {_INDEX} are in no shard, such as {lost[0]!r}"
        )
    return tensors


def _shard_name(index_path: Path, name: object) -> str:
    """A plain file name of this folder: an index must not reach elsewhere."""
    if not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"{index_path} names an impossible shard {name!r}")
    return name
