"""Typed reading of a JSON-like configuration: a wrong type or a missing key is one clear error.

Every getter takes its default explicitly; REQUIRED says that there is none. A null counts as absent, as it
does in Hugging Face configurations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, TypeVar

from engine.errors import ConfigError

T = TypeVar("T")


class Required:
    """The type of REQUIRED."""


REQUIRED: Final = Required()

_LARGEST_INTEGER = 2**31 - 1


class Section:
    """A mapping inside a configuration, which knows its place in the file for error messages."""

    def __init__(self, values: Mapping[str, object], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def mentions(self, key: str) -> bool:
        """Whether the key is there, be it null: some defaults hold for absent keys only."""
        return key in self.values

    def error(self, key: str, problem: str) -> ConfigError:
        """The error to raise about a key."""
        return ConfigError(f"{self.where}: {key} {problem}")

    def integer(
        self, key: str, default: int | T | Required, *, minimum: int = 1, maximum: int = _LARGEST_INTEGER
    ) -> int | T:
        value = self.values.get(key)
        if value is None:
            if isinstance(default, Required):
                raise self.error(key, "is missing")
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be an integer, not {_show(value)}")
        if not minimum <= value <= maximum:
            raise self.error(key, f"must lie between {minimum} and {maximum}, not {_show(value)}")
        return value

    def number(
        self,
        key: str,
        default: float | T | Required,
        *,
        minimum: float = -math.inf,
        maximum: float = math.inf,
    ) -> float | T:
        value = self.values.get(key)
        if value is None:
            if isinstance(default, Required):
                raise self.error(key, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, f"must be a finite number, not {_show(value)}")
        if not minimum <= value <= maximum:
            raise self.error(key, f"must lie between {minimum} and {maximum}, not {_show(value)}")
        return float(value)

    def boolean(self, key: str, default: bool | T | Required) -> bool | T:
        value = self.values.get(key)
        if value is None:
            if isinstance(default, Required):
                raise self.error(key, "is missing")
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {_show(value)}")
        return value

    def string(self, key: str, default: str | T | Required) -> str | T:
        value = self.values.get(key)
        if value is None:
            if isinstance(default, Required):
                raise self.error(key, "is missing")
            return default
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {_show(value)}")
        return value

    def strings(self, key: str, default: tuple[str, ...] | T | Required) -> tuple[str, ...] | T:
        value = self.values.get(key)
        if value is None:
            if isinstance(default, Required):
                raise self.error(key, "is missing")
            return default
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.error(key, f"must be a list of strings, not {_show(value)}")
        return tuple(value)

    def integers(self, key: str, default: tuple[int, ...] | T | Required) -> tuple[int, ...] | T:
        """A list of integers ≥ 0; a lone integer counts as a list of one."""
        value = self.values.get(key)
        if value is None:
            if isinstance(default, Required):
                raise self.error(key, "is missing")
            return default
        items = value if isinstance(value, list | tuple) else [value]
        integers = tuple(int(item) for item in items if isinstance(item, int) and item >= 0)
        if len(integers) != len(items):
            raise self.error(key, f"must be an integer ≥ 0 or a list of such, not {_show(value)}")
        return integers

    def section(self, key: str) -> Section | None:
        """A nested mapping; None if it is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, f"must be an object, not {_show(value)}")
        return Section(value, f"{self.where}: {key}")


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
