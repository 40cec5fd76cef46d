"""The client commands against a running server: output, exit codes, and errors in one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from protos.slipstream.v1.inference_pb2 import GenerateRequest
from protos.slipstream.v1.sampling_pb2 import SamplingParams
from service.cli.app import app
from service.options import flag_name, option_fields
from tests.service.server_process import (
    DEADLINE_S,
    ROOT,
    ServerProcess,
    environment,
    inference,
    run_cli,
    running_server,
)


def cli(server: ServerProcess, *arguments: str, stdin: str | None = None) -> Result:
    """A client command, in this process: starting one costs a second."""
    return CliRunner().invoke(app, [*arguments, "--target", server.target], input=stdin)


def test_generate_streams_text_to_stdout_and_figures_to_stderr(server: ServerProcess) -> None:
    result = run_cli("generate", "The quick brown", "--max-tokens", "8", "--target", server.target)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert "8 tokens" in result.stderr
    assert "first token" in result.stderr
    assert "tokens/s" in result.stderr


def test_generate_json_is_one_object(server: ServerProcess) -> None:
    result = cli(server, "generate", "-", "--json", "--max-tokens", "5", "--temperature", "0", stdin="river")
    answer = json.loads(result.stdout)
    assert result.exit_code == 0
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"]) == 5
    assert answer["finish_reason"] == "LENGTH"
    assert answer["time_to_first_token_s"] > 0


def test_the_same_seed_gives_the_same_answer(server: ServerProcess) -> None:
    arguments = ("generate", "sea", "--json", "--max-tokens", "6", "--seed", "7")
    first, second = (json.loads(cli(server, *arguments).stdout) for _ in range(2))
    assert first["token_ids"] == second["token_ids"]


def test_a_chat_keeps_its_history(server: ServerProcess) -> None:
    messages = "hello\nand again\n/reset\nhello\n"
    result = cli(server, "chat", "--max-tokens", "4", "--temperature", "0", stdin=messages)
    assert result.exit_code == 0
    prompts = [int(count) for count in re.findall(r"prompt (\d+)", result.stderr)]
    assert len(prompts) == 3
    assert prompts[1] > prompts[0]
    assert prompts[2] == prompts[0]


def test_one_chat_message_uses_the_template(server: ServerProcess) -> None:
    result = cli(server, "chat", "hello", "--system", "be brief", "--json", "--max-tokens", "3")
    assert json.loads(result.stdout)["usage"]["completion_tokens"] == 3


def test_tokenize_shows_ids_and_pieces(server: ServerProcess) -> None:
    result = cli(server, "tokenize", "the river", "--json")
    answer = json.loads(result.stdout)
    assert "".join(answer["tokens"]) == "the river"
    assert len(answer["ids"]) == len(answer["tokens"])
    assert "<|im_start|>" in json.loads(cli(server, "tokenize", "hi", "--chat", "--json").stdout)["text"]


def test_status_shows_the_worker(server: ServerProcess) -> None:
    result = cli(server, "status")
    assert "SERVING" in result.stdout
    assert "simulated" in result.stdout
    answer = json.loads(cli(server, "status", "--json").stdout)
    assert answer["fronts"] == 2
    assert answer["workers"][0]["state"] == "WORKER_STATE_READY"


def test_metrics_health_and_abort(server: ServerProcess) -> None:
    assert "slipstream:num_requests_running" in cli(server, "metrics").stdout
    assert cli(server, "health").stdout.strip() == "SERVING"
    assert cli(server, "health", "--wait", "5").exit_code == 0
    assert "no such request" in cli(server, "abort", "unheard-of").stdout


def test_profile_shows_stages(server: ServerProcess) -> None:
    with inference(server) as stub:
        call = stub.Generate(
            GenerateRequest(text="x", sampling=SamplingParams(max_tokens=2000, ignore_eos=True)),
            timeout=DEADLINE_S,
        )
        next(call)
        result = cli(server, "profile", "--steps", "5")
        call.cancel()
    assert result.exit_code == 0, result.stderr
    assert "5 steps" in result.stdout
    assert "execute" in result.stdout


def test_bench_measures(server: ServerProcess) -> None:
    load = ("--streams", "4", "--requests", "8", "--max-tokens", "10", "--prompt-tokens", "5")
    result = cli(server, "bench", *load, "--json")
    answer = json.loads(result.stdout)
    assert answer["completed"] == 8
    assert answer["tokens"] == 80
    assert answer["first_token_ms"]["p99"] >= answer["first_token_ms"]["p50"] > 0
    assert cli(server, "bench", "--streams", "2", "--max-tokens", "4").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("generate", "x", "--temperature", "-1"), "INVALID_ARGUMENT: sampling.temperature"),
        (("generate", "x", "--max-tokens", "0"), "sampling.max_tokens"),
        (("generate", ""), "text"),
        (("generate", "x", "--timeout", "0.001", "--max-tokens", "500"), "DEADLINE_EXCEEDED"),
        (("tokenize", "x", "--tls-ca", "/nowhere/ca.pem"), "/nowhere/ca.pem"),
        (("health", "--service", "nobody"), "NOT_FOUND"),
    ],
)
def test_errors_are_one_line_and_exit_code_1(
    server: ServerProcess, arguments: tuple[str, ...], part: str
) -> None:
    result = cli(server, *arguments)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert part in line


def test_no_server_is_said_plainly() -> None:
    result = CliRunner().invoke(app, ["status", "--target", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert result.stderr == "error: no server answers at 127.0.0.1:1; is `slipstream serve` running there?\n"
    result = CliRunner().invoke(app, ["health", "--wait", "0.2", "--target", "127.0.0.1:1"])
    assert result.stdout == "UNREACHABLE\n"
    assert result.exit_code == 1


def test_tls_token_and_drain(tiny_checkpoint: Path, tmp_path: Path) -> None:
    make_certificate(tmp_path)
    (tmp_path / "tokens").write_text("# who\nsecret-1\nsecret-2\n")
    flags = ("--engine", "simulated", "--auth-token-file", str(tmp_path / "tokens"))
    flags += ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    with running_server(tiny_checkpoint, *flags) as server:
        trust = ("--tls-ca", str(tmp_path / "cert.pem"))
        assert "does it speak TLS" in cli(server, "status").stderr
        assert "is not trusted" in cli(server, "status", "--tls").stderr
        assert "must be PEM" in cli(server, "status", "--tls-ca", str(tmp_path / "tokens")).stderr
        refused = cli(server, "status", *trust)
        assert "UNAUTHENTICATED" in refused.stderr
        assert cli(server, "health", *trust).stdout.strip() == "SERVING"
        answer = cli(server, "generate", "x", "--max-tokens", "3", "--json", "--token", "secret-2", *trust)
        assert len(json.loads(answer.stdout)["token_ids"]) == 3
        drained = cli(server, "drain", "--token", "secret-1", *trust)
        assert drained.exit_code == 0, drained.stderr
        assert server.wait() == 0


def test_tls_against_a_plain_server_is_said_so(server: ServerProcess) -> None:
    assert "does not speak TLS" in cli(server, "status", "--tls").stderr


def test_half_a_client_certificate_is_refused(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    result = CliRunner().invoke(app, ["status", "--tls-cert", str(tmp_path / "cert.pem")])
    assert (result.exit_code, result.stderr) == (2, "error: --tls-cert and --tls-key go together\n")


def make_certificate(folder: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def test_show_config_tells_every_source(tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text("max-queued = 77\n")
    result = CliRunner(env={"SLIPSTREAM_FRONTS": "3"}).invoke(
        app, ["serve", "--show-config", "--port", "1234", "--config", str(config)]
    )
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()[1:]}
    assert rows["port"] == ["1234", "--port"]
    assert rows["fronts"] == ["3", "SLIPSTREAM_FRONTS"]
    assert rows["max-queued"][0] == "77"
    assert rows["host"][-1] == "default"
    assert len([name for name in rows if flag_name(name.replace("-", "_"))]) >= len(list(option_fields()))


def test_serve_without_a_model_says_what_to_do() -> None:
    result = CliRunner().invoke(app, ["serve"])
    assert result.exit_code == 2
    assert "slipstream serve --model" in result.stderr


def test_help_needs_no_heavy_module() -> None:
    """What makes `slipstream --help` slow is imports."""
    code = (
        "import sys\n"
        "sys.argv = ['slipstream', '--help']\n"
        "from service.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'grpc', 'numpy', 'google.protobuf', 'tokenizers', 'structlog', 'prometheus_client'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for command in ("serve", "chat", "status", "bench", "inspect"):
        assert command in result.stdout


def test_inspect_tells_a_usable_model_from_a_broken_one(tiny_checkpoint: Path, tmp_path: Path) -> None:
    good = CliRunner().invoke(app, ["inspect", str(tiny_checkpoint)])
    assert good.exit_code == 0
    assert "llama" in good.stdout.lower()
    assert re.search(r"stop tokens +2, 0$", good.stdout, re.MULTILINE)
    bad = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert bad.exit_code == 1
    (line,) = bad.stderr.splitlines()
    assert str(tmp_path) in line
