"""Which tokens of a real model's vocabulary are ordinary words, so that generated text looks like text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from engine.errors import CheckpointError, ConfigError
from engine.files.gguf_head import read_gguf_metadata
from engine.files.json_file import read_json_object

_ORDINARY = re.compile(r"[Ġ▁]?[A-Za-z]{2,}")
"""A word or a part of one, with byte-level BPE's or SentencePiece's mark for a space before it."""

_GGUF_NORMAL = 1
_DEFAULT_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the simulated engine takes from a model."""

    architecture: str
    size: int
    max_sequence_length: int
    ordinary_ids: tuple[int, ...]
    notes: tuple[str, ...] = ()


def read_vocabulary(model: Path) -> Vocabulary:
    """Of a Hugging Face folder or a GGUF file. Raises ModelError naming the file that will not do."""
    if model.is_dir():
        return _from_folder(model)
    if model.is_file():
        return _from_gguf(model)
    raise CheckpointError(f"there is no model at {model}")


def _from_folder(folder: Path) -> Vocabulary:
    config = read_json_object(folder / "config.json")
    text = config.get("text_config", config)
    size = text.get("vocab_size") if isinstance(text, dict) else None
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"{folder / 'config.json'} gives no vocab_size")
    known = {number: piece for number, piece in _pieces(folder / "tokenizer.json").items() if number < size}
    architectures = config.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else "unknown"
    length = text.get("max_position_embeddings")
    is_length = isinstance(length, int) and length > 0
    return _vocabulary(architecture, size, length if is_length else _DEFAULT_LENGTH, known)


def _pieces(file: Path) -> dict[int, str]:
    """The tokens that the model of a tokenizer.json has, by id, without those that are special."""
    tokenizer = read_json_object(file)
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens") or []
    try:
        vocabulary = model["vocab"]  # type: ignore[index]
        if isinstance(vocabulary, dict):
            pieces = {int(number): str(piece) for piece, number in vocabulary.items()}
        else:
            pieces = {number: str(piece) for number, (piece, _score) in enumerate(vocabulary)}
        special = {token["id"] for token in added}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} holds no vocabulary of a kind that is known") from error
    return {number: piece for number, piece in pieces.items() if number not in special}


def _from_gguf(file: Path) -> Vocabulary:
    metadata = read_gguf_metadata(file)
    architecture = str(metadata.get("general.architecture"))
    pieces, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(pieces, list) or not isinstance(kinds, list) or len(pieces) != len(kinds):
        raise CheckpointError(f"{file} has no tokenizer")
    known = {
        i: str(piece)
        for i, (piece, kind) in enumerate(zip(pieces, kinds, strict=True))
        if kind == _GGUF_NORMAL
    }
    length = metadata.get(f"{architecture}.context_length")
    return _vocabulary(
        architecture, len(pieces), length if isinstance(length, int) else _DEFAULT_LENGTH, known
    )


def _vocabulary(architecture: str, size: int, length: int, known: dict[int, str]) -> Vocabulary:
    ordinary = tuple(sorted(number for number, piece in known.items() if _ORDINARY.fullmatch(piece)))
    if ordinary:
        return Vocabulary(architecture, size, length, ordinary)
    if not known:
        raise CheckpointError("the tokenizer has no tokens besides special ones")
    note = "the vocabulary has no plain words: simulated text is made of any tokens that are not special"
    return Vocabulary(architecture, size, length, tuple(sorted(known)), (note,))
