"""A GGUF model in one file, or in several parts, of which the first has the metadata."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint.gguf_file import GgufFile, read_gguf
from engine.errors import CheckpointError
from engine.files.gguf_names import MAX_PARTS, gguf_part_names


def read_gguf_parts(path: Path) -> GgufFile:
    """The file, together with the other parts beside it if it is the first of several.

    Raises CheckpointError for any part that is missing, malformed or not the first, and for a tensor in two.
    """
    first = read_gguf(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count > MAX_PARTS:
        raise CheckpointError(f"{path}: malformed: a model in {count!r} parts")
    if count <= 1:
        return first
    if first.metadata.get("split.no", 0) != 0:
        raise CheckpointError(f"{path} is not the first of its {count} parts; name that one")
    names = gguf_part_names(path.name)
    if len(names) != count:
        raise CheckpointError(f"{path} is one of {count} parts, but its name does not tell the others'")
    tensors = dict(first.tensors)
    for name in names[1:]:
        part = read_gguf(path.with_name(name))
        for tensor_name, tensor in part.tensors.items():
            if tensor_name in tensors:
                raise CheckpointError(f"{part.path}: tensor {tensor_name!r} stands in another part too")
            tensors[tensor_name] = tensor
    return GgufFile(path, first.metadata, tensors)
