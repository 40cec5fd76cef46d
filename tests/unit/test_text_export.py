"""A tokenizer out of a .gguf file, written as Hugging Face files and read back, is the same tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from service.text import hugging_face_files, load_tokenizer
from tests.unit.text_tools import SAMPLES, gguf_of, trained_byte_level

TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("adds_bos", [False, True])
def test_read_back_it_is_the_same(tmp_path: Path, adds_bos: bool) -> None:
    original = trained_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    settings = {"bos_token_id": 1, "eos_token_id": 2, "padding_token_id": 0, "add_bos_token": adds_bos}
    path = gguf_of(original, tmp_path / "model.gguf", "gpt-2", chat_template=TEMPLATE, **settings)
    ours = load_tokenizer(path)

    folder = tmp_path / "exported"
    folder.mkdir()
    for name, content in hugging_face_files(ours).items():
        (folder / name).write_bytes(content)
    back = load_tokenizer(folder)

    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in SAMPLES:
        ids = ours.encode(text)
        assert (ids[:1] == [1]) == adds_bos
        assert back.encode(text) == ids
        assert plain.encode(text).ids == ids, "any program that reads tokenizer.json gets the same ids"
        assert back.encode(text, add_special_tokens=False) == ours.encode(text, add_special_tokens=False)
    assert (back.bos_token_id, back.eos_token_ids, back.pad_token_id) == (1, (2,), 0)
    assert back.special_ids == ours.special_ids
    assert back.bytes_table == ours.bytes_table
    messages = [{"role": "user", "content": "hi"}]
    assert ours.chat_templates is not None
    assert back.chat_templates is not None
    assert back.chat_templates.render(messages) == ours.chat_templates.render(messages) == "<|im_start|>hi"


def test_several_templates_keep_their_names(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for file in tiny_checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    files = hugging_face_files(load_tokenizer(tmp_path))
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == config["chat_template"]
