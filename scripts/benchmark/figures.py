"""One figure from repeated runs: the median, and how far the runs lie apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured, in which unit, and what it must reach."""

    name: str
    unit: str
    runs: tuple[float, ...]
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    @property
    def holds(self) -> bool | None:
        """Whether the median reaches its goal; None without one."""
        if self.at_least is not None:
            return self.median >= self.at_least
        if self.at_most is not None:
            return self.median <= self.at_most
        return None

    @property
    def goal(self) -> str:
        if self.at_least is not None:
            return f"≥ {_show(self.at_least)}"
        return f"≤ {_show(self.at_most)}" if self.at_most is not None else ""

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "min": min(self.runs),
            "max": max(self.runs),
            "runs": list(self.runs),
            "at_least": self.at_least,
            "at_most": self.at_most,
            "holds": self.holds,
            "note": self.note,
        }


def table(figures: Sequence[Figure]) -> str:
    """Markdown."""
    lines = [
        "| what | unit | median | lowest … highest | runs | goal | |",
        "| --- | --- | ---: | --- | ---: | --- | --- |",
    ]
    for figure in figures:
        verdict = {True: "reached", False: "**missed**", None: ""}[figure.holds]
        name = f"{figure.name}<br>{figure.note}" if figure.note else figure.name
        spread = f"{_show(min(figure.runs))} … {_show(max(figure.runs))}"
        cells = (name, figure.unit, _show(figure.median), spread, str(len(figure.runs)), figure.goal, verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _show(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
