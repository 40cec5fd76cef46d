"""Collects what is wrong with a request, so that a caller learns of everything at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from service.rpc.errors import MAX_VIOLATIONS, InvalidRequest, Violation


class Violations:
    """The violations found so far."""

    def __init__(self) -> None:
        self._found: list[Violation] = []

    def add(self, field: str, description: str) -> None:
        self._found.append(Violation(field, description))

    @property
    def is_empty(self) -> bool:
        return not self._found

    @property
    def is_full(self) -> bool:
        """Whether more would not be shown anyway, so that a loop over a hostile list can end."""
        return len(self._found) > MAX_VIOLATIONS

    def raise_if_any(self) -> None:
        """Raises InvalidRequest if anything was added."""
        if self._found:
            raise InvalidRequest(self._found)


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a field takes. NaN is in no range."""

    low: float
    high: float = math.inf
    is_low_open: bool = False
    """Whether `low` itself is excluded."""

    def check(self, field: str, value: float, violations: Violations) -> None:
        if not math.isfinite(value):
            violations.add(field, f"is {value}; must be a finite number")
        elif value < self.low or value > self.high or (self.is_low_open and value == self.low):
            violations.add(field, f"is {value:.6g}; must be {self}")

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.is_low_open else f"at least {self.low:g}"
        return low if math.isinf(self.high) else f"{low} and at most {self.high:g}"
