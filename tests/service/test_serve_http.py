"""The HTTP port and GetMetrics of a running server: the same series, parsed by prometheus_client's parser."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from protos.slipstream.v1 import control_pb2, control_pb2_grpc
from protos.slipstream.v1.inference_pb2 import GenerateRequest, TokenIds
from protos.slipstream.v1.sampling_pb2 import SamplingParams
from tests.service.server_process import DEADLINE_S, ServerProcess, inference


def get(server: ServerProcess, path: str, method: str = "GET") -> tuple[int, str]:
    url = f"http://127.0.0.1:{server.metrics_port}{path}"
    try:
        request = urllib.request.Request(url, method=method)
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def series(text: str) -> dict[str, float]:
    """Samples by name, added up over all labels but `le`; buckets left out."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "model"
            if "le" not in sample.labels:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def generate(server: ServerProcess, n_requests: int, tokens: int) -> None:
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    for _ in range(n_requests):
        with inference(server) as stub:
            list(
                stub.Generate(
                    GenerateRequest(tokens=TokenIds(ids=[9, 8, 7]), sampling=sampling), timeout=DEADLINE_S
                )
            )


def test_counts_grow_by_what_was_done_whichever_front_did_it(server: ServerProcess) -> None:
    before = series(get(server, "/metrics")[1])
    generate(server, 6, 5)
    after = series(get(server, "/metrics")[1])
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    for prefix in ("slipstream", "vllm"):
        assert grown[f"{prefix}:generation_tokens_total"] == 30
        assert grown[f"{prefix}:prompt_tokens_total"] == 18
        assert grown[f"{prefix}:time_to_first_token_seconds_count"] == 6
        assert grown[f"{prefix}:e2e_request_latency_seconds_count"] == 6
        assert grown[f"{prefix}:request_success_total"] == 6
        assert grown[f"{prefix}:inter_token_latency_seconds_count"] == 24
        assert f"{prefix}:num_requests_waiting" in after
        assert f"{prefix}:prefix_cache_queries_total" in after
        assert 0 <= after[f"{prefix}:kv_cache_usage_perc"] <= 1
    assert grown["vllm:time_per_output_token_seconds_count"] == 24
    assert after["slipstream:workers_ready"] == 1


def test_the_rpc_answers_with_the_same_series(server: ServerProcess) -> None:
    text = get(server, "/metrics")[1]
    with server.channel() as channel:
        answer = control_pb2_grpc.ControlStub(channel).GetMetrics(
            control_pb2.GetMetricsRequest(), timeout=DEADLINE_S
        )
    assert series(answer.prometheus_text).keys() >= series(text).keys()
    typed = {metric.name: metric for metric in answer.metrics}
    first_token = typed["slipstream:time_to_first_token_seconds"]
    assert first_token.kind == control_pb2.Metric.KIND_HISTOGRAM
    assert len(first_token.histogram.bounds) == len(first_token.histogram.counts)
    assert typed["slipstream:rpcs"].labels.keys() == {"method", "code"}


@pytest.mark.parametrize(
    ("path", "method", "code"),
    [
        ("/healthz", "GET", 200),
        ("/readyz", "GET", 200),
        ("/metrics", "HEAD", 200),
        ("/", "GET", 404),
        ("/metrics", "POST", 405),
    ],
)
def test_status_codes(server: ServerProcess, path: str, method: str, code: int) -> None:
    assert get(server, path, method)[0] == code
