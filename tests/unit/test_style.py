"""House rules that no linter knows: first lines, lengths, names of log events, who reads the environment.

What is found is a place to look at, so a rule names every file and line that breaks it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("service", "worker", "engine", "kernels")
MAX_LINES = 400
MAX_BODY_LINES = 40

READS_ENVIRONMENT = {"service/cli/app.py", "service/cli/serve.py", "service/models/demo.py"}
"""Once, at start: how loud gRPC's core is, where options come from, and where the user's cache is."""


def sources(*folders: str) -> list[Path]:
    """Our Python files, generated ones left out."""
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in files if "__pycache__" not in path.parts]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def place(path: Path, node: ast.AST | None = None) -> str:
    line = f":{node.lineno}" if isinstance(node, ast.stmt | ast.expr) else ""
    return f"{path.relative_to(ROOT)}{line}"


def test_every_file_says_what_it_is_for() -> None:
    silent = [
        place(path)
        for path in sources(*ROOMS, "tests", "scripts", "examples/python")
        if path.stat().st_size and not ast.get_docstring(parsed(path))
    ]
    assert silent == []


def is_record(node: ast.ClassDef) -> bool:
    """Fields or members alone."""
    return all(isinstance(part, ast.AnnAssign | ast.Assign | ast.Expr) for part in node.body)


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without signature and docstring."""
    statements = node.body[1:] if ast.get_docstring(node) else node.body
    return (node.end_lineno or 0) - statements[0].lineno + 1 if statements else 0


def test_what_a_module_offers_is_explained() -> None:
    """A class may explain its methods, name and types a short function, its fields a record."""
    silent = [
        f"{place(path, node)} {node.name}"
        for path in sources(*ROOMS)
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
        and not (is_record(node) if isinstance(node, ast.ClassDef) else body_lines(node) <= 12)
    ]
    assert silent == []


def test_files_and_functions_are_short() -> None:
    long = [
        f"{place(path)} has {n} lines"
        for path in sources(*ROOMS)
        if (n := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    ]
    long += [
        f"{place(path, node)} {node.name} has {n} lines"
        for path in sources(*ROOMS)
        for node in functions(path)
        if (n := body_lines(node)) > MAX_BODY_LINES
    ]
    assert long == []


@pytest.mark.parametrize("folder", ["service", "worker", "engine"])
def test_the_environment_is_read_in_one_place_at_start(folder: str) -> None:
    readers = {
        place(path)
        for path in sources(folder)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "putenv")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    }
    assert readers <= READS_ENVIRONMENT


def log_calls(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(parsed(path)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("debug", "info", "warning", "error", "critical", "exception")
            and ast.unparse(node.func.value) in ("log", "self._log")
        ):
            yield node


def test_log_events_have_fixed_names() -> None:
    """One name to search for, with what varies as key=value."""
    loose = [
        place(path, call)
        for path in sources(*ROOMS)
        for call in log_calls(path)
        if len(call.args) != 1
        or not isinstance(call.args[0], ast.Constant)
        or not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", str(call.args[0].value))
    ]
    assert loose == []


def test_no_error_is_swallowed_unseen() -> None:
    """`except Exception: pass`, or a bare except, hides defects."""
    blind = [
        place(path, handler)
        for path in sources(*ROOMS)
        for handler in ast.walk(parsed(path))
        if isinstance(handler, ast.ExceptHandler)
        and (
            handler.type is None
            or (
                ast.unparse(handler.type) in ("Exception", "BaseException")
                and all(isinstance(statement, ast.Pass | ast.Continue) for statement in handler.body)
            )
        )
    ]
    assert blind == []


def test_nothing_is_left_to_do() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    found = [
        f"{place(path)}:{number}"
        for folder in (*ROOMS, "scripts", "protos")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".cu", ".cuh", ".proto", ".sh")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if marks.search(line)
    ]
    assert found == []
