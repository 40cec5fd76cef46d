"""A tokenizer as the files of a Hugging Face folder, whatever it was read from, for other programs."""

from __future__ import annotations

import json
from typing import Any

from service.text.tokenizer import TextTokenizer


def hugging_face_files(tokenizer: TextTokenizer) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json, by name."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    named = {
        "bos_token": tokenizer.bos_token_id,
        "eos_token": tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else None,
        "pad_token": tokenizer.pad_token_id,
    }
    for name, token_id in named.items():
        if token_id is not None:
            config[name] = tokenizer.token_bytes(token_id).decode()
    if tokenizer.chat_templates is not None:
        sources = tokenizer.chat_templates.sources
        config["chat_template"] = [{"name": name, "template": text} for name, text in sources.items()]
        if list(sources) == ["default"]:
            config["chat_template"] = sources["default"]
    return {
        "tokenizer.json": tokenizer.to_json().encode(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2).encode(),
    }
