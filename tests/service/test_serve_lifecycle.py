"""A server's whole life in real processes: ready, draining, stopped, killed; and starts that must fail."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.slipstream.v1.inference_pb2 import FinishReason, GenerateRequest, TokenIds
from protos.slipstream.v1.sampling_pb2 import SamplingParams
from tests.service.server_process import (
    DEADLINE_S,
    ServerProcess,
    assert_one_error_line,
    descendants,
    free_port,
    http_status,
    inference,
    is_alive,
    run_cli,
    running_server,
    wait_until,
)

SLOW = ("--engine", "simulated", "--simulated-step-us", "4000")


def request(tokens: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    return GenerateRequest(tokens=TokenIds(ids=[5, 6, 7]), sampling=sampling)


def test_a_drain_finishes_streams_refuses_new_ones_and_exits_with_0(tiny_checkpoint: Path) -> None:
    started = running_server(tiny_checkpoint, *SLOW, metrics_port=free_port())
    with started as server, inference(server) as stub:
        assert http_status(server, "/readyz") == 200
        stream = stub.Generate(request(300), timeout=DEADLINE_S)
        tokens = list(next(stream).token_ids)
        server.send_to_group(signal.SIGINT)
        with server.channel() as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), timeout=DEADLINE_S, wait_for_ready=True
            )
            states = (message.status for message in watch)
            assert health_pb2.HealthCheckResponse.NOT_SERVING in states
            with pytest.raises(grpc.RpcError) as refused:
                next(stub.Generate(request(1), timeout=DEADLINE_S))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "draining" in refused.value.details()
            assert http_status(server, "/readyz") == 503
            assert http_status(server, "/healthz") == 200
            last = None
            for message in stream:
                tokens.extend(message.token_ids)
                last = message
        assert len(tokens) == 300
        assert last is not None
        assert last.finish_reason == FinishReason.FINISH_REASON_LENGTH
        assert server.wait() == 0
        assert "draining: 1 stream left" in server.stderr
        assert "died" not in server.stderr
        assert "Traceback" not in server.stderr


def test_a_second_signal_stops_at_once(tiny_checkpoint: Path) -> None:
    with running_server(tiny_checkpoint, *SLOW) as server, inference(server) as stub:
        stream = stub.Generate(request(2000), timeout=DEADLINE_S)
        next(stream)
        processes = descendants(server.process.pid)
        server.send_to_group(signal.SIGINT)
        wait_until(lambda: "draining" in server.stderr, "the drain begins")
        server.send_to_group(signal.SIGINT)
        assert server.wait() == 130
        with pytest.raises(grpc.RpcError):
            list(stream)
        wait_until(lambda: not any(map(is_alive, processes)), "all processes are gone")


def test_a_drain_with_a_timeout_cuts_off_what_still_runs(tiny_checkpoint: Path) -> None:
    flags = (*SLOW, "--drain-timeout", "0.3")
    with running_server(tiny_checkpoint, *flags) as server, inference(server) as stub:
        stream = stub.Generate(request(2000), timeout=DEADLINE_S)
        next(stream)
        server.send_to_group(signal.SIGTERM)
        with pytest.raises(grpc.RpcError):
            list(stream)
        assert server.wait() == 0
        assert "died" not in server.stderr


def test_nobody_is_left_when_the_main_process_is_killed(tiny_checkpoint: Path) -> None:
    flags = (*SLOW, "--fronts", "2")
    with running_server(tiny_checkpoint, *flags) as server, inference(server) as stub:
        next(stub.Generate(request(2000), timeout=DEADLINE_S))
        processes = descendants(server.process.pid)
        assert len(processes) >= 3
        server.send(signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, processes)), "all processes are gone")


def test_a_signal_before_it_is_ready_ends_it_cleanly(tiny_checkpoint: Path) -> None:
    with ServerProcess(tiny_checkpoint, *SLOW) as server:
        wait_until(lambda: descendants(server.process.pid), "the first process is started")
        server.send(signal.SIGTERM)
        assert server.wait() == 0
        assert "Traceback" not in server.stderr


def truncated_gguf(folder: Path) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00\xff\xff\x00\x00")
    return path


def broken_folder(folder: Path) -> Path:
    path = folder / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    return path


@pytest.mark.parametrize("make", [truncated_gguf, broken_folder, lambda folder: folder / "absent"])
def test_a_bad_model_is_one_line_and_no_traceback(make: object, tmp_path: Path) -> None:
    assert callable(make)
    model = make(tmp_path)
    result = run_cli("serve", "--model", str(model), "--port", "0", "--metrics-port", "0")
    assert_one_error_line(result.returncode, result.stderr, str(model))


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_a_taken_port_is_one_line_and_no_traceback(flag: str, tiny_checkpoint: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = {"--port": "0", "--metrics-port": "0"} | {flag: str(port)}
        arguments = [argument for pair in ports.items() for argument in pair]
        result = run_cli("serve", "--model", str(tiny_checkpoint), "--engine", "simulated", *arguments)
    assert_one_error_line(result.returncode, result.stderr, str(port))
    assert flag in result.stderr


def test_tls_files_that_are_none_are_one_line_and_no_traceback(tiny_checkpoint: Path, tmp_path: Path) -> None:
    pem = tmp_path / "not.pem"
    pem.write_text("not a certificate")
    result = run_cli(
        *("serve", "--model", str(tiny_checkpoint), "--engine", "simulated", "--port", "0"),
        *("--metrics-port", "0", "--tls-cert", str(pem), "--tls-key", str(pem)),
    )
    assert_one_error_line(result.returncode, result.stderr, "")


def test_a_server_starts_again_at_once_on_the_same_port(tiny_checkpoint: Path) -> None:
    with running_server(tiny_checkpoint, "--engine", "simulated") as server, inference(server) as stub:
        list(stub.Generate(request(2), timeout=DEADLINE_S))
        port = server.target.rpartition(":")[2]
        server.send(signal.SIGTERM)
        assert server.wait() == 0
    flags = ("--engine", "simulated", "--port", port)
    with running_server(tiny_checkpoint, *flags) as server, inference(server) as stub:
        assert server.target.endswith(port)
        assert list(stub.Generate(request(2), timeout=DEADLINE_S))
