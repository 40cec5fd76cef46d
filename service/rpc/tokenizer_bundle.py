"""A model's tokenizer files as one zip archive, for a gateway that tokenizes on its own."""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

from service.text import TextTokenizer, hugging_face_files

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
"""What Hugging Face tokenizers are made of; config.json may be the only one to tell the tokenizer's class."""

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""A fixed time makes the archive, and so its fingerprint, the same on every server of a model."""


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """A zip archive and its fingerprint."""

    data: bytes
    sha256: str


def bundle_tokenizer(path: Path, tokenizer: TextTokenizer) -> TokenizerBundle:
    """The files of a model folder as they are; for a .gguf file, which keeps its tokenizer inside, files of
    the same meaning. Blocks."""
    if path.is_dir():
        files = {name: (path / name).read_bytes() for name in FILE_NAMES if (path / name).is_file()}
    else:
        files = hugging_face_files(tokenizer)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, date_time=_EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    data = buffer.getvalue()
    return TokenizerBundle(data, hashlib.sha256(data).hexdigest())
