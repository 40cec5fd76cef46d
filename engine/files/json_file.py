"""JSON files of a model folder, read within bounds and with clear errors."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

MAX_JSON_BYTES = 128_000_000
"""The largest tokenizer.json in use has some 35 MB."""


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ConfigError, also for a file that is not there."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
            raise ConfigError(f"{path} is no regular file")
        if status.st_size > MAX_JSON_BYTES:
            raise ConfigError(f"{path} is too large for a model's JSON file")
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"{path.parent} has no {path.name}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return value


def read_optional_json_object(path: Path) -> dict[str, Any]:
    """The same; {} if there is no such file."""
    return read_json_object(path) if path.is_file() else {}
