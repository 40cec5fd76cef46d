"""Where options come from, in which order, and what is said of those that cannot be used."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from service.options import LoadedOptions, OptionsError, load_options


def load(
    flags: dict[str, Any] | None = None, environment: dict[str, str] | None = None, config: Path | None = None
) -> LoadedOptions:
    return load_options(flags or {}, environment or {}, config)


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text('port = 1001\nmax-queued = 1002\nworkers = 3\nlog_format = "json"\n')
    environment = {"SLIPSTREAM_MAX_QUEUED": "2002", "SLIPSTREAM_PORT": "2001"}
    loaded = load({"port": 3001}, environment, config)
    assert loaded.options.port == 3001
    assert loaded.options.max_queued == 2002
    assert loaded.options.workers == 3
    assert loaded.options.log_format == "json"
    assert loaded.options.fronts == 1
    assert loaded.sources["port"] == "--port"
    assert loaded.sources["max_queued"] == "SLIPSTREAM_MAX_QUEUED"
    assert loaded.sources["workers"] == str(config)
    assert loaded.sources["fronts"] == "default"


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text("fronts = 4\n")
    assert load(environment={"SLIPSTREAM_CONFIG": str(config)}).options.fronts == 4


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("TRUE", True), ("on", True), ("no", False), ("0", False)]
)
def test_booleans_from_the_environment(text: str, value: bool) -> None:
    assert load(environment={"SLIPSTREAM_REFLECTION": text}).options.reflection is value


def test_an_empty_variable_unsets_an_optional_value() -> None:
    assert load(environment={"SLIPSTREAM_KV_PAGES": ""}).options.kv_pages is None


def test_a_kubernetes_service_link_is_no_port() -> None:
    """A Service named slipstream puts SLIPSTREAM_PORT=tcp://... into the environment of every pod."""
    loaded = load(environment={"SLIPSTREAM_PORT": "tcp://10.0.0.7:50051"})
    assert loaded.options.port == 50051
    assert "SLIPSTREAM_PORT" in loaded.warnings[0]


@pytest.mark.parametrize(
    ("flags", "environment", "parts"),
    [
        ({}, {"SLIPSTREAM_PORT": "http"}, ["SLIPSTREAM_PORT", "whole number"]),
        ({}, {"SLIPSTREAM_ENGINE": "gpu"}, ["SLIPSTREAM_ENGINE", "reference"]),
        ({}, {"SLIPSTREAM_REFLECTION": "maybe"}, ["SLIPSTREAM_REFLECTION", "true or false"]),
        ({}, {"SLIPSTREAM_WORKERS": "0"}, ["--workers", "at least 1", "SLIPSTREAM_WORKERS"]),
        ({"workers": 100_000}, {}, ["--workers", "at most 256"]),
        ({"max_sequence_length": 10**10}, {}, ["--max-sequence-length", "at most 16777216"]),
        ({"kv_pages": 10**11}, {}, ["--kv-pages", "at most 16777216"]),
        ({"simulated_step_us": math.inf}, {}, ["--simulated-step-us", "finite"]),
        ({"served_name": "a\nb"}, {}, ["--served-name", "printable"]),
        ({"max_sequences": 8, "max_step_tokens": 7}, {}, ["--max-step-tokens", "--max-sequences, 8"]),
        ({"port": 70000}, {}, ["--port", "65535"]),
        ({"port": 5, "metrics_port": 5}, {}, ["--metrics-port", "--port"]),
        ({"memory_fraction": 1.5}, {}, ["--memory-fraction"]),
        ({"memory_fraction": float("nan")}, {}, ["--memory-fraction"]),
        ({"drain_timeout": -1.0}, {}, ["--drain-timeout"]),
        ({"simulated_step_us": -1.0}, {}, ["--simulated-step-us"]),
        ({"tls_cert": Path("/etc/hostname")}, {}, ["--tls-key"]),
        ({"tls_client_ca": Path("/etc/hostname")}, {}, ["--tls-client-ca", "--tls-cert"]),
        ({"auth_token_file": Path("/nowhere/tokens")}, {}, ["--auth-token-file", "/nowhere/tokens"]),
    ],
)
def test_what_cannot_be_used_is_named(
    flags: dict[str, Any], environment: dict[str, str], parts: list[str]
) -> None:
    with pytest.raises(OptionsError) as error:
        load(flags, environment)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("max_queue = 3", "did you mean max_queued"),
        ("port = ", "not valid TOML"),
        ("port = 1.5", "whole number"),
        ("port = true", "whole number"),
        ("host = 5", "not a text"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, part: str) -> None:
    config = tmp_path / "server.toml"
    config.write_text(text)
    with pytest.raises(OptionsError) as error:
        load(config=config)
    assert part in str(error.value)
    assert str(config) in str(error.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="No such file"):
        load(config=tmp_path / "absent.toml")
