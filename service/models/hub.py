"""Models from the Hugging Face Hub, through huggingface_hub: its cache, its token, its offline mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors as hub_errors
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from service.models.types import ModelNotFound, Progress, ResolvedModel
from worker.client import gguf_part_names

_WANTED = ("*.json", "*.safetensors", "*.jinja")
"""Configuration, weights, tokenizer.json and templates. Not the same weights in other formats."""
_NOT_WANTED = ("original/*", "onnx/*", "openvino/*", "consolidated*.safetensors", "*.index.json.lock")


def fetch_from_hub(name: str, revision: str | None, progress: Progress) -> ResolvedModel:
    """`name`: "org/model", or "org/model:file.gguf" for one file with its parts. Raises ModelNotFound."""
    repository, _, file = name.partition(":")
    try:
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(gguf_part_names(file) if file else _WANTED),
            ignore_patterns=None if file else list(_NOT_WANTED),
            tqdm_class=_progress_bar(progress),
        )
    except Exception as error:
        raise ModelNotFound(_explain(repository, revision, error)) from error
    path = Path(folder).absolute()
    if file:
        path /= file
        if not path.is_file():
            raise ModelNotFound(f"{repository} on the Hugging Face Hub has no file {file}.")
    elif not (path / "config.json").is_file():
        raise ModelNotFound(
            f"{repository} on the Hugging Face Hub has no config.json, so it is no checkpoint. "
            f'If it holds GGUF files, name one: "{repository}:FILE.gguf".'
        )
    return ResolvedModel(path, repository)


def _explain(repository: str, revision: str | None, error: Exception) -> str:
    """What went wrong and what to do; subclasses before their bases."""
    match error:
        case hub_errors.HFValidationError():
            return f"{repository!r} is no file or folder here and no valid name on the Hugging Face Hub."
        case hub_errors.GatedRepoError():
            return (
                f"{repository} on the Hugging Face Hub is gated: accept its terms on its page there, then "
                "log in with `hf auth login` or set HF_TOKEN."
            )
        case hub_errors.DisabledRepoError():
            return f"{repository} has been disabled on the Hugging Face Hub."
        case hub_errors.RevisionNotFoundError():
            return f"{repository} on the Hugging Face Hub has no revision {revision}."
        case hub_errors.RepositoryNotFoundError():
            return (
                f"There is no {repository} on this machine nor on the Hugging Face Hub. If it is private, "
                "log in with `hf auth login` or set HF_TOKEN."
            )
        case hub_errors.OfflineModeIsEnabled() | hub_errors.LocalEntryNotFoundError():
            return (
                f"{repository} is not on this machine, and the Hugging Face Hub cannot be reached (no "
                "connection, or HF_HUB_OFFLINE is set). Give the path of a local model instead."
            )
        case _:
            return f"{repository} could not be downloaded from the Hugging Face Hub: {error}"


def _progress_bar(progress: Progress) -> type[Any]:
    """A progress bar class for huggingface_hub that reports instead of drawing."""
    best = 0.0

    class Reporter(tqdm):  # type: ignore[misc]
        """The Hub makes one bar for files and two for bytes; those for bytes count."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": False, "file": _Nowhere()})

        def update(self, n: float | None = 1) -> Any:
            nonlocal best
            shown = super().update(n)
            if self._counts_bytes and self.total:
                # More files, and so more bytes, become known on the way; what is shown never goes back.
                best = max(best, min(self.n / self.total, 1.0))
                progress("download", best)
            return shown

    return Reporter


class _Nowhere:
    """A file to draw progress bars on that nobody sees."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass
