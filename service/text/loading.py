"""From a model's path to its tokenizer."""

from __future__ import annotations

from pathlib import Path

from service.text.errors import TokenizerError
from service.text.gguf_file import read_gguf
from service.text.hf_folder import read_folder
from service.text.tokenizer import TextTokenizer


def load_tokenizer(path: Path) -> TextTokenizer:
    """Reads a Hugging Face folder or a .gguf file.

    Raises TokenizerError, naming the path, for files that are missing, broken, or of a kind that is not
    supported.
    """
    parts = read_folder(path) if path.is_dir() else read_gguf(path)
    try:
        return TextTokenizer(parts)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
