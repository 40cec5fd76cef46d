"""What a worker measures about itself, under the names that dashboards and endpoint pickers know.

Counts come from the scheduler when asked for; only times are recorded as they happen, once a step or once
a sequence, never once a token. Knows no queue and no Prometheus.
"""

from __future__ import annotations

from worker.messages import MetricData
from worker.metrics import DURATION_BOUNDS_S, LATENCY_BOUNDS_S, SIZE_BOUNDS, Histogram, MetricsRegistry
from worker.scheduling.stats import SchedulerStats

METRICS_PREFIX = "slipstream:"
"""Begins the names of all series, of workers, fronts and the server."""


class WorkerInstruments:
    """Also the scheduler's observer."""

    def __init__(self, worker: int) -> None:
        self._labels = (("worker", str(worker)),)
        self._registry = MetricsRegistry()
        self._queue_time = self._histogram(
            "request_queue_time_seconds", "From a sequence's arrival to its first step.", DURATION_BOUNDS_S
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a sequence.", LATENCY_BOUNDS_S
        )
        self._step_duration = self._histogram(
            "step_duration_seconds", "Of one engine step.", LATENCY_BOUNDS_S
        )
        self._step_tokens = self._histogram(
            "step_tokens", "Tokens computed in one step, prefill and decode.", SIZE_BOUNDS
        )
        self._first_tokens = 0
        self._last_tokens_at: float | None = None
        self._last_step_at = 0.0

    def started(self, queue_s: float) -> None:
        self._queue_time.observe(queue_s)

    def first_token(self) -> None:
        self._first_tokens += 1

    def step_collected(self, now: float, executed_at: float, rows: int, tokens: int) -> None:
        """A step's result is in: `rows` were computed, `tokens` were given to sequences.

        A sequence's next token comes with the next step that has tokens, so the time between two such
        steps counts once for each token that is not a sequence's first.
        """
        self._step_duration.observe(now - max(executed_at, self._last_step_at))
        self._step_tokens.observe(rows)
        self._last_step_at = now
        later_tokens, self._first_tokens = tokens - self._first_tokens, 0
        if self._last_tokens_at is not None and later_tokens > 0:
            self._inter_token.observe(now - self._last_tokens_at, later_tokens)
        if tokens:
            self._last_tokens_at = now

    def went_idle(self) -> None:
        """The time until the next token is nobody's wait."""
        self._last_tokens_at = None

    def export(self, stats: SchedulerStats, held: int) -> list[MetricData]:
        """All metrics as they stand; `held`: sequences that wait outside the scheduler."""
        usage = (stats.pages - stats.pages_free - stats.pages_cached) / max(1, stats.pages)
        gauges = [
            ("num_requests_running", "Sequences that hold a slot.", stats.running),
            ("num_requests_waiting", "Sequences in line.", stats.waiting + held),
            ("num_requests_paused", "Sequences halted because their client does not read.", stats.paused),
            ("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", usage),
        ]
        counters = [
            ("prefix_cache_queries", "Prompt tokens looked for in the prefix cache.", stats.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
            ("prompt_tokens", "Prompt tokens of started sequences.", stats.prompt_tokens),
            ("prefill_tokens", "Tokens computed in prefill, recomputation included.", stats.prefill_tokens),
            ("generation_tokens", "Tokens generated.", stats.generated_tokens),
            ("num_preemptions", "Sequences put back for lack of pages.", stats.preemptions),
            ("steps", "Engine steps.", stats.steps),
        ]
        metrics = [self._data(name, "gauge", help, value) for name, help, value in gauges]
        metrics += [self._data(name, "counter", help, value) for name, help, value in counters]
        metrics += [
            self._data(
                "sequences_finished", "counter", "Sequences that ended, by reason.", count, reason.name
            )
            for reason, count in stats.finished.items()
        ]
        metrics += [
            self._data(
                "requests_rejected", "counter", "Requests not admitted, by reason.", count, reason.name
            )
            for reason, count in stats.rejected.items()
        ]
        return metrics + self._registry.export()

    def _data(self, name: str, kind: str, help: str, value: float, reason: str | None = None) -> MetricData:
        labels = self._labels if reason is None else (*self._labels, ("reason", reason.lower()))
        return MetricData(METRICS_PREFIX + name, kind, help, labels, float(value))

    def _histogram(self, name: str, help: str, bounds: tuple[float, ...]) -> Histogram:
        return self._registry.add(Histogram(METRICS_PREFIX + name, help, bounds, self._labels))
