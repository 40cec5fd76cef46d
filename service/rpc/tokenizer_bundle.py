"""A model's tokenizer files as one zip archive, for a gateway that tokenizes on its own."""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

# What Hugging Face tokenizers are made of; config.json tells the tokenizer's class where nothing else does.
FILE_NAMES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)

# A fixed time makes the archive, and so its fingerprint, the same on every server of a model.
_EPOCH = (1980, 1, 1, 0, 0, 0)


class NoTokenizerFiles(Exception):
    """The model does not come with tokenizer files of its own."""


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """A zip archive and its fingerprint."""

    data: bytes
    sha256: str


def bundle_tokenizer(path: Path) -> TokenizerBundle:
    """Reads a model folder; blocks. Raises NoTokenizerFiles."""
    files = [path / name for name in FILE_NAMES if (path / name).is_file()]
    if not any(file.name in ("tokenizer.json", "tokenizer.model", "vocab.json") for file in files):
        raise NoTokenizerFiles(
            f"{path.name} holds no tokenizer files (a .gguf file keeps its tokenizer inside); "
            "give the gateway the tokenizer's own path"
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            entry = zipfile.ZipInfo(file.name, date_time=_EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, file.read_bytes())
    data = buffer.getvalue()
    return TokenizerBundle(data, hashlib.sha256(data).hexdigest())
