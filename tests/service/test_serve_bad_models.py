"""Checkpoints that are broken in ways that only loading shows: one clear line, an exit code, no traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.service.server_process import assert_one_error_line, run_cli


def change_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut_off(model: Path) -> str:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return "is truncated"


def misshapen(model: Path) -> str:
    change_config(model, intermediate_size=32)
    return "has shape"


def incomplete(model: Path) -> str:
    change_config(model, num_hidden_layers=50)
    return "lacks"


def more_than_it_says(model: Path) -> str:
    change_config(model, num_hidden_layers=1)
    return "has no use for"


def of_unknown_architecture(model: Path) -> str:
    change_config(model, architectures=["HypotheticalForCausalLM"])
    return "'HypotheticalForCausalLM' is not supported"


def with_a_number_for_a_chat_template(model: Path) -> str:
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": 5}))
    return "chat_template of tokenizer_config.json"


def without_tokenizer(model: Path) -> str:
    (model / "tokenizer.json").write_text("{}")
    return "tokenizer.json"


@pytest.mark.parametrize(
    "spoil",
    [
        cut_off,
        misshapen,
        incomplete,
        more_than_it_says,
        of_unknown_architecture,
        without_tokenizer,
        with_a_number_for_a_chat_template,
    ],
)
def test_a_broken_checkpoint_is_one_line(
    spoil: Callable[[Path], str], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, model)
    problem = spoil(model)
    flags = ("--engine", "reference", "--port", "0", "--metrics-port", "0")
    result = run_cli("serve", "--model", str(model), *flags)
    assert_one_error_line(result.returncode, result.stderr, problem)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert line.count(str(model)) <= 1
