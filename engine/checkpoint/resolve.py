"""Finds every weight a model needs among a file's tensors, whatever they are called there.

Probes where the decoder sits and where its head is, cuts fused experts apart, pairs FP8 weights with
their scales, and accounts for every tensor: used, known and not needed, or unknown. Reads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from engine.checkpoint.tensor import SourceTensor, Tensor
from engine.config import ModelConfig, expected_tensors
from engine.errors import CheckpointError

Loader = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Found:
    """Where one weight comes from."""

    load: Loader
    sources: tuple[str, ...]
    """Tensors of the file that it takes from."""
    problem: str | None = None
    """Why it cannot be used after all (shape, type, scale)."""


class Finder(Protocol):
    """Knows one file format's names and quirks."""

    def find(self, canonical: str, shape: tuple[int, ...]) -> Found | None:
        """The weight of that name; None if the file has nothing for it."""

    def file_name(self, canonical: str) -> str:
        """What a weight is called in such a file."""

    def not_needed(self, source: str) -> bool:
        """Whether a tensor that no weight uses is known: a vision tower, a cached table."""


@dataclass(slots=True)
class Resolution:
    """What a file has for a model, good and bad."""

    found: dict[str, Found] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """By the names they would have in the file."""
    problems: list[str] = field(default_factory=list)
    """Whole sentences about weights of the wrong shape or type."""
    unused: list[str] = field(default_factory=list)
    """Known and not needed."""
    unknown: list[str] = field(default_factory=list)
    """Not accounted for: the model may be another than its configuration says."""

    def raise_if_unusable(self, path: object) -> None:
        """Raises CheckpointError with one message about the gravest kind of trouble."""
        if self.missing:
            raise CheckpointError(f"{path} lacks {_some(self.missing, 'tensor')}")
        if self.problems:
            more = f" (and {len(self.problems) - 1} more like it)" if len(self.problems) > 1 else ""
            raise CheckpointError(f"{path}: {self.problems[0]}{more}")
        if self.unknown:
            raise CheckpointError(
                f"{path} has {_some(self.unknown, 'tensor')} that this architecture has no use for; "
                "the model would be silently wrong without them"
            )


def resolve(config: ModelConfig, sources: Mapping[str, SourceTensor], finder: Finder) -> Resolution:
    """Looks for all of expected_tensors(config)."""
    result = Resolution()
    used: set[str] = set()
    for canonical, shape in expected_tensors(config).items():
        found = finder.find(canonical, shape)
        if found is None:
            result.missing.append(finder.file_name(canonical))
            continue
        used.update(found.sources)
        if found.problem is not None:
            result.problems.append(found.problem)
        result.found[canonical] = found
    for name in sources:
        if name not in used:
            (result.unused if finder.not_needed(name) else result.unknown).append(name)
    return result


def _some(names: list[str], noun: str) -> str:
    """ "2 tensors: a, b"; long lists are cut."""
    shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
    return f"{len(names)} {noun}{'s' if len(names) > 1 else ''}: {shown}"


def matches_any(name: str, patterns: tuple[re.Pattern[str], ...]) -> bool:
    return any(pattern.search(name) for pattern in patterns)
