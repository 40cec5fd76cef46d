"""What a front measures: calls by method and status, and answers as clients got them.

Recorded once a call or once an answer, never once a message. Knows no Prometheus.
"""

from __future__ import annotations

from worker.client import (
    DURATION_BOUNDS_S,
    METRICS_PREFIX,
    SIZE_BOUNDS,
    Counter,
    Gauge,
    Histogram,
    MetricData,
    MetricsRegistry,
)


class FrontInstruments:
    """One front's instruments."""

    def __init__(self) -> None:
        self._registry = MetricsRegistry()
        self._rpcs: dict[tuple[str, str], Counter] = {}
        self._finished: dict[str, Counter] = {}
        self._open = self._registry.add(
            Gauge(METRICS_PREFIX + "open_rpcs", "Calls that fronts are answering.")
        )
        self._first_token = self._duration(
            "time_to_first_token_seconds", "From a call's arrival to its first token."
        )
        self._total = self._duration(
            "e2e_request_latency_seconds", "From a call's arrival to its last token."
        )
        self._rpc_time = self._duration(
            "rpc_duration_seconds", "Of calls other than streams of Health.Watch."
        )
        self._prompt = self._size("request_prompt_tokens", "Prompt tokens of a request.")
        self._generated = self._size("request_generation_tokens", "Generated tokens of an answer.")

    def rpc_started(self) -> None:
        self._open.set(self._open.value + 1)

    def rpc_ended(self, method: str, code: str, duration_s: float) -> None:
        """`method` as service/Method; `code` is the status's name."""
        self._open.set(self._open.value - 1)
        if (method, code) not in self._rpcs:
            labels = (("method", method), ("code", code))
            counter = Counter(METRICS_PREFIX + "rpcs", "Calls by method and gRPC status.", labels)
            self._rpcs[method, code] = self._registry.add(counter)
        self._rpcs[method, code].add()
        if not method.endswith("/Watch"):
            self._rpc_time.observe(duration_s)

    def answered(
        self, prompt_tokens: int, completion_tokens: int, reason: str, first_token_s: float, total_s: float
    ) -> None:
        """An answer is whole. `reason`: "stop", "length" or "abort". Times since the call's arrival."""
        if reason not in self._finished:
            labels = (("finished_reason", reason),)
            counter = Counter(METRICS_PREFIX + "request_success", "Answers by what ended them.", labels)
            self._finished[reason] = self._registry.add(counter)
        self._finished[reason].add()
        self._prompt.observe(prompt_tokens)
        self._generated.observe(completion_tokens)
        if completion_tokens:
            self._first_token.observe(first_token_s)
        self._total.observe(total_s)

    def export(self) -> list[MetricData]:
        return self._registry.export()

    def _duration(self, name: str, help_text: str) -> Histogram:
        return self._registry.add(Histogram(METRICS_PREFIX + name, help_text, DURATION_BOUNDS_S))

    def _size(self, name: str, help_text: str) -> Histogram:
        return self._registry.add(Histogram(METRICS_PREFIX + name, help_text, SIZE_BOUNDS))
