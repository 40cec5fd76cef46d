"""The server's metrics: what fronts measure, how all processes' series become one, and the Prometheus text.

Series stand under `slipstream:` names; those that endpoint pickers and dashboards written for vLLM read
are repeated under vLLM's names. Knows plain MetricData, and nothing of how it travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from worker.client import METRICS_PREFIX, MetricData, merge_metrics

VLLM_NAMES: dict[str, tuple[str, ...]] = {
    # The Gateway API inference extension's endpoint picker reads these three; older releases of it know
    # the last under its former name.
    "num_requests_running": ("vllm:num_requests_running",),
    "num_requests_waiting": ("vllm:num_requests_waiting",),
    "kv_cache_usage_perc": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "cache_config_info": ("vllm:cache_config_info",),
    "prefix_cache_queries": ("vllm:prefix_cache_queries",),
    "prefix_cache_hits": ("vllm:prefix_cache_hits",),
    "num_preemptions": ("vllm:num_preemptions",),
    "prompt_tokens": ("vllm:prompt_tokens",),
    "generation_tokens": ("vllm:generation_tokens",),
    "time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "inter_token_latency_seconds": (
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
    ),
    "e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "request_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "request_generation_tokens": ("vllm:request_generation_tokens",),
    "request_success": ("vllm:request_success",),
}
"""By name without prefix: the names under which vLLM has the same series."""


@dataclass
class ProcessMetrics:
    """The latest series of processes that come and go. Counters of dead ones stay in the sum, so that a
    restart does not look like a reset, which rate() would read as a burst of all that came before."""

    _latest: dict[tuple[object, ...], list[MetricData]] = field(default_factory=dict)
    _departed: list[MetricData] = field(default_factory=list)
    _gone: set[tuple[object, ...]] = field(default_factory=set)

    def update(self, process: tuple[object, ...], metrics: list[MetricData]) -> None:
        """`process`: any key that a restarted process does not share with its predecessor. Late news of one
        that is over is ignored: it would count twice."""
        if process not in self._gone:
            self._latest[process] = metrics

    def keep_only(self, alive: Iterable[tuple[object, ...]]) -> None:
        """Every process not in `alive` is over: its gauges go, its counters stay."""
        for process in self._latest.keys() - set(alive):
            self._gone.add(process)
            lasting = [metric for metric in self._latest.pop(process) if metric.kind != "gauge"]
            self._departed = merge_metrics([self._departed, lasting])

    def merged(self) -> list[MetricData]:
        return merge_metrics([*self._latest.values(), self._departed])


def prometheus_text(metrics: Sequence[MetricData], model_name: str) -> str:
    """The exposition format, with the aliases; every series is labelled with the model's name."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(metrics, model_name))
    return generate_latest(registry).decode()


class _Snapshot(Collector):
    """One moment's series, as prometheus_client wants to be handed them."""

    def __init__(self, metrics: Sequence[MetricData], model_name: str) -> None:
        self._metrics = metrics
        self._model = ("model_name", model_name)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, list[MetricData]] = {}
        for metric in self._metrics:
            families.setdefault(metric.name, []).append(metric)
        for name, series in list(families.items()):
            for alias in VLLM_NAMES.get(name.removeprefix(METRICS_PREFIX), ()):
                families[alias] = _over_workers(series)
        for full_name, series in families.items():
            yield _family(full_name, [replace(one, labels=(*one.labels, self._model)) for one in series])


def _over_workers(series: Sequence[MetricData]) -> list[MetricData]:
    """The same without the label `worker`: pickers expect one series a server. Counts add up; shares of a
    whole are averaged (workers have the same number of pages)."""
    plain = [
        replace(one, labels=tuple(label for label in one.labels if label[0] != "worker")) for one in series
    ]
    merged = merge_metrics([plain])
    if series[0].name.endswith("_perc"):
        return [replace(one, value=one.value * len(merged) / len(series)) for one in merged]
    return merged


def _family(name: str, series: Sequence[MetricData]) -> Metric:
    """All series of one name; they have the same kind and label names."""
    first = series[0]
    label_names = [label for label, _ in first.labels]
    if first.kind == "histogram":
        family = HistogramMetricFamily(name, first.help, labels=label_names)
        for one in series:
            assert one.histogram is not None
            family.add_metric(_values(one), _cumulative(one), one.histogram.sum)
        return family
    kind = CounterMetricFamily if first.kind == "counter" else GaugeMetricFamily
    plain = kind(name, first.help, labels=label_names)
    for one in series:
        plain.add_metric(_values(one), one.value)
    return plain


def _values(metric: MetricData) -> list[str]:
    return [value for _, value in metric.labels]


def _cumulative(metric: MetricData) -> list[tuple[str, float]]:
    """Prometheus counts all values up to a bound; the last bound is +Inf."""
    assert metric.histogram is not None
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip(metric.histogram.bounds, metric.histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), total))
    return buckets
