"""The arrows between the folders point down only: service → worker → engine → kernels."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = {"protos", "service", "worker", "engine", "kernels", "tests", "scripts"}
ALLOWED = {
    "service": {"service", "protos", "worker.client"},
    "worker": {"worker", "engine"},
    "engine": {"engine", "kernels"},
    "kernels": {"kernels"},
}


def imported_modules(path: Path) -> set[str]:
    """All absolute module names a file imports, at its top or anywhere inside."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            if node.module in OURS:  # from worker import client
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] in OURS and name not in OURS}


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_imports_point_down(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        for name in imported_modules(path):
            allowed = any(name == prefix or name.startswith(prefix + ".") for prefix in ALLOWED[folder])
            assert allowed, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("module", ["service.front", "service.serve", "service.cli"])
def test_rpc_processes_load_no_cuda(module: str) -> None:
    """Neither the front nor the main process may come near a CUDA context or an engine's kernels."""
    code = (
        f"import sys, {module}\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('cuda', 'nvmath', 'kernels') "
        "or m.startswith(('engine.cuda', 'engine.reference'))]\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_the_client_of_workers_is_light() -> None:
    """Every process of the service imports it, the short-lived command line too."""
    code = (
        "import sys, worker.client\n"
        "heavy = {'gguf', 'ml_dtypes', 'tokenizers', 'grpc', 'kernels', 'cuda', 'nvmath'}\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in heavy "
        "or m.startswith(('engine.checkpoint', 'engine.quantization', 'engine.cuda', 'engine.reference'))]\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
