"""The committed stubs are what the committed .proto files generate."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"

# What differs between releases of the generator for the same .proto: version stamps, nothing else.
_STAMPS = re.compile(
    r"^# Protobuf Python Version: .*\n"
    r"|^GRPC_GENERATED_VERSION = .*\n"
    r"|^    \d+,\n",
    re.MULTILINE,
)


def test_regenerating_changes_nothing(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "generate_protos.py"
    subprocess.run([sys.executable, script, "--out", tmp_path], cwd=ROOT, check=True, capture_output=True)
    fresh = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*_pb2*.py*")}
    committed = {path.relative_to(PROTOS): path.read_text() for path in PROTOS.rglob("*_pb2*.py*")}
    committed = {path: text for path, text in committed.items() if "__pycache__" not in path.parts}
    assert fresh.keys() == committed.keys()
    for path, text in fresh.items():
        assert _STAMPS.sub("", text) == _STAMPS.sub("", committed[path]), f"{path}: run {script.name}"


def test_every_method_is_explained() -> None:
    """People who only have the .proto must find what a method does."""
    for path in PROTOS.rglob("*.proto"):
        lines = [line.strip() for line in path.read_text().splitlines()]
        for before, line in itertools.pairwise(lines):
            if line.startswith("rpc "):
                assert before.startswith("//"), f"{path.name}: {line}"
