"""What every figure depends on: the machine, its load, and the versions in use."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("grpcio", "protobuf", "numpy", "tokenizers", "cuda-python")


def describe_machine() -> dict[str, Any]:
    """Taken at the start of a run, so that its own load does not count."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
        "versions": {name: _version(name) for name in LIBRARIES},
    }


def _commit() -> str:
    """With a mark if files differ from it, results aside; "unknown" in a copy without history."""
    if shutil.which("git") is None:
        return "unknown"
    commit = _git("rev-parse", "--short=10", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks")
    return (commit + "-dirty" if changed else commit) or "unknown"


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return result.stdout.strip()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
