"""The client examples, run as their READMEs say, against a real server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.service.server_process import ServerProcess, running_server

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NODE = EXAMPLES / "node"
DEADLINE_S = 120.0

Client = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path) -> Iterator[ServerProcess]:
    with running_server(tiny_checkpoint, "--engine", "reference") as running:
        yield running


def run(command: list[str], folder: Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, input=stdin, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


@pytest.fixture(scope="module")
def python_client(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Client:
    """In a folder of its own: it has nothing but what the example's README has it make."""
    folder = tmp_path_factory.mktemp("python-example")
    shutil.copy(EXAMPLES / "python" / "client.py", folder)
    generator = str(EXAMPLES / "python" / "generate_stubs.py")
    made = run([sys.executable, generator, "--out", str(folder)], folder)
    assert made.returncode == 0, made.stderr
    command = [sys.executable, "client.py", "--target", server.target]
    return lambda *arguments, stdin=None: run([*command, *arguments], folder, stdin)


@pytest.fixture(scope="module")
def node_modules() -> Path:
    """The example's packages, installed as its lock file says."""
    if shutil.which("npm") is None:
        pytest.skip("Node.js is not installed")
    modules = NODE / "node_modules"
    installed = modules / ".package-lock.json"
    lock = NODE / "package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        result = run(["npm", "ci", "--no-progress"], NODE)
        if result.returncode != 0 and re.search(r"ENOTFOUND|ECONNREFUSED|ETIMEDOUT|EAI_AGAIN", result.stderr):
            pytest.skip("no npm registry can be reached")
        assert result.returncode == 0, result.stderr
    return modules


@pytest.fixture(scope="module")
def node_client(server: ServerProcess, node_modules: Path) -> Client:
    command = ["node", "client.js", "--target", server.target]
    return lambda *arguments, stdin=None: run([*command, *arguments], NODE, stdin)


@pytest.fixture(params=["python_client", "node_client"])
def client(request: pytest.FixtureRequest) -> Client:
    chosen: Client = request.getfixturevalue(request.param)
    return chosen


def test_the_lines_of_the_readme_run(server: ServerProcess, tmp_path: Path) -> None:
    (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert "localhost:50051" in lines
    program = lines.replace("localhost:50051", server.target)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}"]
    result = run(command, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout


REPORT = re.compile(
    r"\[\w*(STOP|LENGTH): (\d+) prompt tokens \((\d+) from cache\), (\d+) generated, "
    r"first after \d+ ms, then [\d.-]+ tokens/s\]"
)


def test_a_question_is_answered_as_a_stream(client: Client) -> None:
    result = client("--max-tokens", "12", "chat", "Tell me of the river")
    assert result.returncode == 0, result.stderr
    report = REPORT.search(result.stderr)
    assert report is not None, result.stderr
    assert 1 <= int(report[4]) <= 12


def test_a_conversation_keeps_its_history(client: Client) -> None:
    result = client("--max-tokens", "8", "chat", stdin="one line\nand another\n")
    assert result.returncode == 0, result.stderr
    first, second = REPORT.findall(result.stderr)
    assert int(second[1]) > int(first[1])


def test_requests_are_ended_early(client: Client) -> None:
    result = client("cancel")
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"cancelled after \d+ tokens: CANCELLED\naborted by id: CANCELLED\n", result.stdout)


def test_errors_are_told(client: Client) -> None:
    result = client("errors")
    assert result.returncode == 0, result.stderr
    assert "fields out of range: INVALID_ARGUMENT: " in result.stdout
    assert re.search(r"^  sampling\.temperature: ", result.stdout, re.M)
    assert re.search(r"^  sampling\.top_p: ", result.stdout, re.M)
    assert "another model's name: NOT_FOUND: " in result.stdout
    assert "too little time: DEADLINE_EXCEEDED: " in result.stdout


def test_a_server_that_is_not_there_is_one_clear_line(python_client: Client, node_client: Client) -> None:
    for client in (python_client, node_client):
        result = client("--target", "127.0.0.1:1", "cancel")
        assert "UNAVAILABLE" in result.stdout + result.stderr
        assert "Traceback" not in result.stderr


def stubs(folder: Path) -> dict[str, str]:
    """This project's stubs by file name, without comments."""
    return {
        path.name: re.sub(r"/\*\*.*?\*/|^//[^\n]*", "", path.read_text(), flags=re.S | re.M)
        for path in (folder / "slipstream" / "v1").iterdir()
    }


def test_the_committed_node_stubs_are_what_the_generator_makes(node_modules: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    made = subprocess.run(
        ["bash", str(NODE / "generate-stubs.sh"), str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert stubs(NODE / "generated") == stubs(tmp_path), "remake them: cd examples/node && npm run generate"
