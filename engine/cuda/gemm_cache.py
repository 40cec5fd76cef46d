"""Tuned algorithms kept on disk between runs: one JSON file per GPU and cuBLASLt version.

An algorithm's bytes mean something to one library version alone, and its rank to one kind of GPU; both are
in the file's name and in the file.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import structlog

from engine.cuda.cublaslt import Algorithm
from engine.cuda.gemm_key import GemmKey

_FORMAT = 1
_WORDS = 8
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Tuned:
    """The winner for one key."""

    algorithm: Algorithm
    microseconds: float
    heuristic_microseconds: float
    """Of the heuristic's first choice, beside it."""


def default_cache_folder() -> Path:
    """The user's cache folder for tuned matrix products."""
    return Path.home() / ".cache" / "slipstream" / "gemm"


class GemmCache:
    """What is known for one kind of GPU and library version. A file that cannot be used counts as empty."""

    def __init__(self, folder: Path, gpu: str, multiprocessors: int, library: str) -> None:
        """gpu: its name, with MIG's profile where there is one. library: cuBLASLt's version."""
        slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
        self.path = folder / f"{slug}-{multiprocessors}sm-cublaslt-{library}.json"
        self._identity = {
            "format": _FORMAT,
            "gpu": gpu,
            "multiprocessors": multiprocessors,
            "cublaslt": library,
        }
        self._entries = self._read()
        self._changed = False

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: GemmKey) -> Tuned | None:
        return self._entries.get(str(key))

    def put(self, key: GemmKey, tuned: Tuned) -> None:
        """Kept in memory until save()."""
        self._entries[str(key)] = tuned
        self._changed = True

    def save(self) -> None:
        """Writes what is new, together with what others wrote meanwhile. A folder that cannot be written is
        logged and costs the next start its tuning, nothing else.
        """
        if not self._changed:
            return
        self._entries = self._read() | self._entries
        document = {
            **self._identity,
            "plans": {key: _to_json(tuned) for key, tuned in sorted(self._entries.items())},
        }
        try:
            _replace(self.path, json.dumps(document, indent=1, ensure_ascii=False))
        except OSError as error:
            _log.warning("gemm_cache_not_written", path=str(self.path), reason=str(error))
            return
        self._changed = False

    def _read(self) -> dict[str, Tuned]:
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            if {name: document[name] for name in self._identity} != self._identity:
                raise ValueError("it is for another GPU or library")
            return {key: _from_json(entry) for key, entry in document["plans"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("gemm_cache_not_read", path=str(self.path), reason=str(error))
            return {}


def _to_json(tuned: Tuned) -> dict[str, object]:
    return {
        "algorithm": [f"{word:#x}" for word in tuned.algorithm.words],
        "workspace": tuned.algorithm.workspace,
        "us": round(tuned.microseconds, 3),
        "heuristic_us": round(tuned.heuristic_microseconds, 3),
    }


def _from_json(entry: dict[str, object]) -> Tuned:
    """Raises ValueError, KeyError or TypeError for anything but what _to_json writes."""
    words = entry["algorithm"]
    if not isinstance(words, list) or len(words) != _WORDS:
        raise ValueError("an algorithm has not eight words")
    numbers = tuple(int(word, 16) for word in words)
    workspace = entry["workspace"]
    if not isinstance(workspace, int) or workspace < 0 or not all(0 <= n < 2**64 for n in numbers):
        raise ValueError("an algorithm is out of range")
    times = [entry["us"], entry["heuristic_us"]]
    if not all(isinstance(time, int | float) for time in times):
        raise ValueError("a time is no number")
    return Tuned(Algorithm(numbers, workspace), *(float(str(time)) for time in times))


def _replace(path: Path, text: str) -> None:
    """Writes the whole file or nothing, whoever else writes it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
