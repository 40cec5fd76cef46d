"""Decides what a model's name means: a path, a demo model, or a repository on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from service.models.demo import DEMO_MODELS, fetch_demo_model
from service.models.hub import fetch_from_hub
from service.models.types import ModelNotFound, Progress, ResolvedModel, no_progress
from worker.client import gguf_part_names

_PATH_STARTS = ("/", "./", "../", "~", ".\\")


def resolve_model(
    name: str, *, progress: Progress | None = None, revision: str | None = None
) -> ResolvedModel:
    """Finds the model, downloading it if need be. Blocks; raises ModelNotFound.

    `name`: a folder or .gguf file, a demo model's name, a Hub id ("org/model"), or one file of a Hub
    repository ("org/model:file.gguf"). What exists on this machine comes first. `revision`: branch, tag
    or commit on the Hub.
    """
    progress = progress or no_progress
    if not name.strip():
        raise ModelNotFound("No model is named.")
    try:
        path = Path(name).expanduser()
        is_here = path.exists()
    except (OSError, RuntimeError) as error:  # too long a name, a forbidden folder, an unknown user's home
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelNotFound(f"{name[:200]} cannot be looked up: {reason}.") from error
    if is_here:
        return _local(path)
    if name.lower() in DEMO_MODELS:
        return fetch_demo_model(name.lower(), progress)
    if name.startswith(_PATH_STARTS) or (name.endswith(".gguf") and ":" not in name):
        raise ModelNotFound(f"There is no file or folder {name}.")
    if "/" not in name:
        raise ModelNotFound(
            f"{name!r} is no file or folder here, no demo model ({', '.join(DEMO_MODELS)}) and no Hub id, "
            'which has the form "organisation/model".'
        )
    return fetch_from_hub(name, revision, progress)


def _local(path: Path) -> ResolvedModel:
    path = path.resolve()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFound(f"{path} is no .gguf file; give a .gguf file or the folder of a checkpoint.")
        return ResolvedModel(path, path.stem)
    if (path / "config.json").is_file():
        return ResolvedModel(path, path.name)
    files = _gguf_models(path)
    match files:
        case [only]:
            return ResolvedModel(only, only.stem)
        case []:
            raise ModelNotFound(f"{path} holds no model: neither a config.json nor a .gguf file is in it.")
    raise ModelNotFound(
        f"{path} holds several .gguf files; name one: {', '.join(file.name for file in files)}."
    )


def _gguf_models(folder: Path) -> list[Path]:
    """The folder's .gguf files, of a model in several parts the first only."""
    files = sorted(folder.glob("*.gguf"))
    later_parts = {name for file in files for name in gguf_part_names(file.name)[1:]}
    return [file for file in files if file.name not in later_parts]
