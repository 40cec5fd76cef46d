"""One snapshot out of many processes, and its Prometheus text as prometheus_client's own parser reads it."""

from __future__ import annotations

from math import inf

import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.metrics import VLLM_NAMES, ProcessMetrics, prometheus_text
from worker.client import Counter, Gauge, Histogram, MetricData


def counter(value: float, worker: str = "0") -> MetricData:
    metric = Counter("slipstream:generation_tokens", "Tokens.", (("worker", worker),))
    metric.add(value)
    return metric.export()


def gauge(name: str, value: float, worker: str = "0") -> MetricData:
    metric = Gauge(f"slipstream:{name}", "A gauge.", (("worker", worker),))
    metric.set(value)
    return metric.export()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_histogram_is_cumulative_and_ends_with_infinity() -> None:
    histogram = Histogram("slipstream:time_to_first_token_seconds", "TTFT.", [0.01, 0.1])
    for value in (0.005, 0.05, 0.06, 3.0):
        histogram.observe(value)
    found = samples(prometheus_text([histogram.export()], "m"))
    model = ("model_name", "m")
    for name in ("slipstream:time_to_first_token_seconds", "vllm:time_to_first_token_seconds"):
        buckets = [found[f"{name}_bucket", (("le", le), model)] for le in ("0.01", "0.1", "+Inf")]
        assert buckets == [1, 3, 4]
        assert found[f"{name}_count", (model,)] == 4
        assert found[f"{name}_sum", (model,)] == pytest.approx(3.115)


def test_pickers_see_one_series_a_server_and_people_one_a_worker() -> None:
    text = prometheus_text(
        [
            gauge("num_requests_running", 3, "0"),
            gauge("num_requests_running", 4, "1"),
            gauge("kv_cache_usage_perc", 0.25, "0"),
            gauge("kv_cache_usage_perc", 0.75, "1"),
        ],
        "m",
    )
    found = samples(text)
    model = ("model_name", "m")
    assert found["slipstream:num_requests_running", (model, ("worker", "1"))] == 4
    assert found["vllm:num_requests_running", (model,)] == 7
    assert found["vllm:kv_cache_usage_perc", (model,)] == pytest.approx(0.5)
    assert found["vllm:gpu_cache_usage_perc", (model,)] == pytest.approx(0.5)


def test_counters_of_a_process_that_died_stay_in_the_sum_and_its_gauges_go() -> None:
    series = ProcessMetrics()
    series.update(("worker", 0, 0), [counter(100), gauge("num_requests_running", 5)])
    series.update(("worker", 1, 0), [counter(7, "1")])
    series.keep_only([("worker", 1, 0)])
    series.update(("worker", 0, 0), [counter(100)])  # an answer that was long under way
    series.update(("worker", 0, 1), [counter(1), gauge("num_requests_running", 2)])
    merged = {(metric.name, metric.labels): metric.value for metric in series.merged()}
    assert merged["slipstream:generation_tokens", (("worker", "0"),)] == 101
    assert merged["slipstream:generation_tokens", (("worker", "1"),)] == 7
    assert merged["slipstream:num_requests_running", (("worker", "0"),)] == 2


def test_an_update_replaces_what_the_same_process_said_before() -> None:
    series = ProcessMetrics()
    series.update(("front", 0, 0), [counter(1)])
    series.update(("front", 0, 0), [counter(2)])
    assert [metric.value for metric in series.merged()] == [2]


def test_odd_model_names_are_escaped() -> None:
    name = 'a "quoted" \\ name\nover two lines'
    (sample,) = next(iter(text_string_to_metric_families(prometheus_text([gauge("x", 1)], name)))).samples
    assert sample.labels["model_name"] == name


def test_an_empty_server_has_an_empty_text() -> None:
    assert prometheus_text([], "m") == ""


def test_no_alias_names_two_series() -> None:
    aliases = [alias for names in VLLM_NAMES.values() for alias in names]
    assert len(aliases) == len(set(aliases))


def test_infinite_bounds_are_spelled_as_prometheus_wants() -> None:
    histogram = Histogram("slipstream:steps", "Steps.", [1.0])
    assert histogram.bounds[-1] == inf
    assert 'le="+Inf"' in prometheus_text([histogram.export()], "m")
