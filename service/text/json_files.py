"""JSON files of a model folder, read with clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from service.text.errors import TokenizerError


def read_json_object(path: Path, *, required: bool = False) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no such file. Raises TokenizerError."""
    if not path.is_file():
        if required:
            raise TokenizerError(f"{path} is missing.")
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} does not hold a JSON object.")
    return value
