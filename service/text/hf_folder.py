"""A tokenizer from a Hugging Face model folder: tokenizer.json and the small files beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from service.text.chat import ChatTemplates
from service.text.errors import ChatTemplateError, TokenizerError
from service.text.token_bytes import decoder_from_json
from service.text.tokenizer import TokenizerParts
from worker.client import (
    ModelError,
    read_eos_token_ids,
    read_generation_defaults,
    read_json_object,
    read_optional_json_object,
)

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_folder(folder: Path) -> TokenizerParts:
    """Raises TokenizerError."""
    try:
        return _read(folder)
    except ModelError as error:
        raise TokenizerError(str(error)) from error


def _read(folder: Path) -> TokenizerParts:
    description = _read_tokenizer_json(folder)
    config = read_optional_json_object(folder / "tokenizer_config.json")
    named = _named_tokens(folder, config)
    tokenizer = _build(folder / "tokenizer.json")
    _add_missing_tokens(tokenizer, config, named)
    generation_path = folder / "generation_config.json"
    generation = read_optional_json_object(generation_path)
    ids = {name: tokenizer.token_to_id(text) for name, text in named.items()}
    try:
        decoder = decoder_from_json(description.get("decoder"))
        templates = _chat_templates(folder, config, named)
    except (TokenizerError, ChatTemplateError) as error:
        raise TokenizerError(f"{folder}: {error}") from error
    return TokenizerParts(
        name=str(config.get("tokenizer_class") or description["model"].get("type") or "tokenizer.json"),
        tokenizer=tokenizer,
        decoder=decoder,
        bos_token_id=ids.get("bos_token"),
        pad_token_id=ids.get("pad_token"),
        eos_token_ids=_eos_ids(folder, ids.get("eos_token"), generation),
        chat_templates=templates,
        generation_defaults=read_generation_defaults(generation, str(generation_path)),
    )


def _read_tokenizer_json(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [n for n in ("tokenizer.model", "tekken.json", "vocab.json") if (folder / n).is_file()]
        hint = f" ({', '.join(others)} alone cannot be read; save the fast tokenizer)" if others else ""
        raise TokenizerError(f"{folder} has no tokenizer.json{hint}.")
    description = read_json_object(path)
    if not isinstance(description.get("model"), dict):
        raise TokenizerError(f"{path} describes no tokenizer model.")
    return description


def _build(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    # A file may ask for every text to be cut or padded to some length; a server must do neither.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _token_text(value: object) -> str | None:
    """A token as configurations write it: a string, or an object with its content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _named_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of bos_token, eos_token … and of further named tokens a chat template may use."""
    special_map = read_optional_json_object(folder / "special_tokens_map.json")
    further = [name for name in config if name.endswith("_token")]
    named = {}
    for name in dict.fromkeys([*_NAMED_TOKENS, *further]):
        text = _token_text(config.get(name)) or _token_text(special_map.get(name))
        if text is not None:
            named[name] = text
    return named


def _add_missing_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Tokens that only tokenizer_config.json marks as added or special.

    None is added that the vocabulary lacks at that id: the model would have no row for it.
    """
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder")
    for token_id, entry in (listed if isinstance(listed, Mapping) else {}).items():
        text = _token_text(entry)
        if text is None or text in present or str(tokenizer.token_to_id(text)) != str(token_id):
            continue
        is_special = entry.get("special") is True
        tokenizer.add_tokens([AddedToken(text, special=is_special, normalized=not is_special)])
        present.add(text)
    for name in _NAMED_TOKENS:
        text = named.get(name)
        if text is not None and text not in present and tokenizer.token_to_id(text) is not None:
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
            present.add(text)


def _eos_ids(folder: Path, own: int | None, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokenizer's own, then those of the first file that states any."""
    path = folder / "config.json"
    model = read_optional_json_object(path)
    inner = model.get("text_config")
    stated = (
        read_eos_token_ids(generation, str(folder / "generation_config.json"))
        or read_eos_token_ids(model, str(path))
        or read_eos_token_ids(inner if isinstance(inner, Mapping) else {}, f"{path}: text_config")
    )
    return (*(() if own is None else (own,)), *stated)


def _chat_templates(
    folder: Path, config: Mapping[str, Any], named: Mapping[str, str]
) -> ChatTemplates | None:
    """Templates in files of their own come before the one in tokenizer_config.json."""
    templates = _stated_templates(config, "tokenizer_config.json")
    main = folder / "chat_template.jinja"
    files = {"default": main, **{p.stem: p for p in sorted(folder.glob("additional_chat_templates/*.jinja"))}}
    for name, path in files.items():
        if path.is_file():
            templates[name] = _read_text(path)
    if not main.is_file():
        templates |= _stated_templates(
            read_optional_json_object(folder / "chat_template.json"), "chat_template.json"
        )
    return ChatTemplates(templates, named) if templates else None


def _stated_templates(config: Mapping[str, Any], file: str) -> dict[str, str]:
    """By name, from a key that holds one template or a list of named ones. Raises TokenizerError."""
    match config.get("chat_template"):
        case None:
            return {}
        case str(text):
            return {"default": text}
        case list(entries):
            templates = {}
            for entry in entries:
                match entry:
                    case {"name": str(name), "template": str(text)}:
                        templates[name] = text
                    case _:
                        raise TokenizerError(f"chat_template of {file}: an entry has no name or no template.")
            return templates
        case _:
            raise TokenizerError(f"chat_template of {file} is neither a text nor a list of named texts.")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
