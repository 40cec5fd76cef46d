"""How the parts of a GGUF model in several files are called: …-00001-of-00003.gguf. Opens no file."""

from __future__ import annotations

import re

MAX_PARTS = 1000
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def gguf_part_names(name: str) -> tuple[str, ...]:
    """Names of all parts of the model whose first part is called so; (name,) for a file on its own.

    A later part, and one that claims to be one of more than MAX_PARTS, counts as a file on its own.
    """
    match = _PART.fullmatch(name)
    if match is None or int(match["number"]) != 1 or not 1 <= int(match["count"]) <= MAX_PARTS:
        return (name,)
    count = int(match["count"])
    return tuple(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1))
