"""Counters, gauges and histograms light enough for a step loop, as plain data that adds up over processes.

One observation costs a bisection, and many equal ones cost one: a step records its whole batch's
inter-token latency in a single call. Knows neither Prometheus nor what is measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Protocol, TypeVar

from worker.messages import HistogramData, MetricData

Labels = tuple[tuple[str, str], ...]

LATENCY_BOUNDS_S: tuple[float, ...] = (
    0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015,
    0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0,
)  # fmt: skip
"""For times between tokens and of steps: fine enough to see a tenth of a millisecond move."""

DURATION_BOUNDS_S: tuple[float, ...] = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
"""For times of whole requests: to the first token, in the queue, end to end."""

SIZE_BOUNDS: tuple[float, ...] = tuple(float(2**power) for power in range(18))
"""For counts of tokens."""


class Counter:
    """A number that only grows."""

    __slots__ = ("help", "labels", "name", "value")

    def __init__(self, name: str, help: str, labels: Labels = ()) -> None:
        self.name, self.help, self.labels = name, help, labels
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount

    def export(self) -> MetricData:
        return MetricData(self.name, "counter", self.help, self.labels, self.value)


class Gauge:
    """A number as it stands."""

    __slots__ = ("help", "labels", "name", "value")

    def __init__(self, name: str, help: str, labels: Labels = ()) -> None:
        self.name, self.help, self.labels = name, help, labels
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = value

    def export(self) -> MetricData:
        return MetricData(self.name, "gauge", self.help, self.labels, self.value)


class Histogram:
    """How often a value fell into each bucket; a bucket's upper bound belongs to it."""

    __slots__ = ("bounds", "counts", "help", "labels", "name", "sum")

    def __init__(self, name: str, help: str, bounds: Sequence[float], labels: Labels = ()) -> None:
        """`bounds`: ascending upper bounds; +inf is added."""
        self.name, self.help, self.labels = name, help, labels
        self.bounds = (*bounds, inf)
        self.counts = [0] * len(self.bounds)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Records `value`, `times` times over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def export(self) -> MetricData:
        data = HistogramData(self.bounds, tuple(self.counts), self.sum)
        return MetricData(self.name, "histogram", self.help, self.labels, histogram=data)


class Metric(Protocol):
    """What a registry holds."""

    def export(self) -> MetricData: ...


AnyMetric = TypeVar("AnyMetric", bound=Metric)


class MetricsRegistry:
    """Metrics that are exported together."""

    def __init__(self) -> None:
        self._metrics: list[Metric] = []

    def add(self, metric: AnyMetric) -> AnyMetric:
        """Returns `metric`, so that a definition is one expression."""
        self._metrics.append(metric)
        return metric

    def export(self) -> list[MetricData]:
        return [metric.export() for metric in self._metrics]


def merge_metrics(groups: Iterable[Iterable[MetricData]]) -> list[MetricData]:
    """Adds up the series of equal name and labels, in order of first appearance.

    Raises ValueError if two of them differ in kind or bounds.
    """
    merged: dict[tuple[str, Labels], MetricData] = {}
    for group in groups:
        for metric in group:
            series = (metric.name, metric.labels)
            before = merged.get(series)
            merged[series] = metric if before is None else _add(before, metric)
    return list(merged.values())


def _add(first: MetricData, second: MetricData) -> MetricData:
    if first.kind != second.kind:
        raise ValueError(f"metric {first.name} is both a {first.kind} and a {second.kind}")
    if first.histogram is None or second.histogram is None:
        return replace(first, value=first.value + second.value)
    if first.histogram.bounds != second.histogram.bounds:
        raise ValueError(f"histogram {first.name} comes with two sets of bounds")
    counts = tuple(map(sum, zip(first.histogram.counts, second.histogram.counts, strict=True)))
    total = first.histogram.sum + second.histogram.sum
    return replace(first, histogram=HistogramData(first.histogram.bounds, counts, total))
