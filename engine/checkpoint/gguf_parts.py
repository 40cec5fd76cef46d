"""A GGUF model in one file, or in parts named …-00001-of-00003.gguf, of which the first has the metadata."""

from __future__ import annotations

import re
from pathlib import Path

from engine.checkpoint.gguf_file import GgufFile, read_gguf
from engine.errors import CheckpointError

_MAX_PARTS = 1000
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def read_gguf_parts(path: Path) -> GgufFile:
    """The file, together with the other parts beside it if it is the first of several.

    Raises CheckpointError for any part that is missing, malformed or not the first, and for a tensor in two.
    """
    first = read_gguf(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count > _MAX_PARTS:
        raise CheckpointError(f"{path}: malformed: a model in {count!r} parts")
    if count <= 1:
        return first
    match = _PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(f"{path} is one of {count} parts, but its name does not tell the others'")
    if int(match["number"]) != 1:
        raise CheckpointError(f"{path} is not the first of its {count} parts; name that one")
    tensors = dict(first.tensors)
    for number in range(2, count + 1):
        part = read_gguf(path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf"))
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{part.path}: tensor {name!r} stands in another part too")
            tensors[name] = tensor
    return GgufFile(path, first.metadata, tensors)
