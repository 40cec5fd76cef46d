"""Tokenizers from Hugging Face folders, held to the `tokenizers` library and to hand-made cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from service.text import TextTokenizer, TokenizerError, load_tokenizer
from tests.unit.text_tools import (
    SAMPLES,
    sentencepiece_reference_decoder,
    sentencepiece_tokenizer,
    texts,
    trained_byte_level,
)
from worker.client import GenerationDefaults


def save(folder: Path, tokenizer: Tokenizer, **files: Any) -> Path:
    """A model folder; keyword arguments are files without their .json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return trained_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


@pytest.fixture(scope="module")
def loaded(byte_level: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(save(tmp_path_factory.mktemp("model"), byte_level))


def test_the_tiny_checkpoint_loads(tiny_checkpoint: Path) -> None:
    tokenizer = load_tokenizer(tiny_checkpoint)
    assert tokenizer.has_chat_template
    assert tokenizer.decode(tokenizer.encode(SAMPLES[0])) == SAMPLES[0]


@given(text=texts)
def test_round_trip(loaded: TextTokenizer, text: str) -> None:
    assert loaded.decode(loaded.encode(text)) == text


@given(text=texts)
def test_encodes_as_the_library(loaded: TextTokenizer, byte_level: Tokenizer, text: str) -> None:
    assert loaded.encode(text) == byte_level.encode(text).ids


@given(ids=st.lists(st.integers(0, 499), max_size=40), skip=st.booleans())
def test_decodes_as_the_library(
    loaded: TextTokenizer, byte_level: Tokenizer, ids: list[int], skip: bool
) -> None:
    assert loaded.decode(ids, skip_special_tokens=skip) == byte_level.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 20_000])
def test_short_and_long_texts_encode_alike(loaded: TextTokenizer, byte_level: Tokenizer, length: int) -> None:
    text = ("".join(SAMPLES) * (length // 100 + 1))[:length]
    assert loaded.encode(text) == byte_level.encode(text).ids


def test_special_tokens_in_a_text_become_their_ids(loaded: TextTokenizer) -> None:
    ids = loaded.encode("<|im_start|>user")
    assert ids[0] == 1
    assert loaded.special_ids == {0, 1, 2}
    assert loaded.decode(ids) == "<|im_start|>user"
    assert loaded.decode(ids, skip_special_tokens=True) == "user"


def test_token_bytes_put_together_are_the_text(loaded: TextTokenizer) -> None:
    text = SAMPLES[2]
    assert b"".join(map(loaded.token_bytes, loaded.encode(text))) == text.encode()


@pytest.mark.parametrize("token_id", [-1, 500, 10**12])
def test_ids_beyond_the_vocabulary_have_no_bytes(loaded: TextTokenizer, token_id: int) -> None:
    assert loaded.vocab_size == 500
    assert loaded.token_bytes(token_id) == b""
    assert loaded.decode([token_id]) == ""


def sentencepiece_bpe() -> Tokenizer:
    """Like Llama 2's: ▁ for spaces, bytes as fallback, a space before the text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = sentencepiece_reference_decoder()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=["▁"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in SAMPLES], trainer)
    description = json.loads(tokenizer.to_str())
    # The trainer knows no byte tokens; they are ordinary entries of the vocabulary.
    description["added_tokens"] = [t for t in description["added_tokens"] if t["content"] in special]
    return Tokenizer.from_str(json.dumps(description))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> tuple[TextTokenizer, Tokenizer]:
    tokenizer = sentencepiece_bpe()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "tokenizer_class": "LlamaTokenizer"}
    folder = save(tmp_path_factory.mktemp("pieces"), tokenizer, tokenizer_config=config)
    return load_tokenizer(folder), tokenizer


@given(text=texts.filter(lambda text: "▁" not in text))
def test_sentencepiece_round_trip(pieces: tuple[TextTokenizer, Tokenizer], text: str) -> None:
    ours, library = pieces
    ids = ours.encode(text)
    assert ids == library.encode(text).ids
    assert ids[0] == ours.bos_token_id == 1
    assert ours.decode(ids, skip_special_tokens=True) == text


@given(ids=st.lists(st.integers(259, 400), max_size=20))
def test_sentencepiece_decodes_as_the_library(
    pieces: tuple[TextTokenizer, Tokenizer], ids: list[int]
) -> None:
    ours, library = pieces
    assert ours.decode(ids) == library.decode(ids, skip_special_tokens=False)


def test_special_tokens_are_added_only_on_request(pieces: tuple[TextTokenizer, Tokenizer]) -> None:
    ours, _ = pieces
    assert ours.encode("a") == [1, *ours.encode("a", add_special_tokens=False)]
    assert ours.name == "LlamaTokenizer"
    assert ours.eos_token_ids == (2,)


def test_bytes_that_are_no_characters_decode_as_one_sequence_of_bytes() -> None:
    """Python's rule, one U+FFFD for each broken character, not one for each byte token."""
    tokenizer = sentencepiece_tokenizer()
    assert tokenizer.decode([0xE2, 0x82, 259]) == b"\xe2\x82a".decode("utf-8", "replace") == "\ufffda"


def test_metaspace_and_unigram_decode(tmp_path: Path) -> None:
    vocabulary = [("<unk>", 0.0), ("▁hello", -1.0), ("▁world", -1.5), ("▁", -3.0), ("o", -4.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    ours = load_tokenizer(save(tmp_path, tokenizer))
    ids = ours.encode("hello world")
    assert ids == [1, 2]
    assert ours.decode(ids) == tokenizer.decode(ids) == "hello world"
    assert ours.token_bytes(2) == b" world"


@pytest.mark.parametrize(
    ("decoder", "named"),
    [(decoders.WordPiece(), "WordPiece"), (decoders.CTC(), "CTC"), (decoders.Strip(" ", 2, 0), "Strip")],
)
def test_decoders_that_need_more_than_bytes_are_refused_by_name(
    byte_level: Tokenizer, tmp_path: Path, decoder: decoders.Decoder, named: str
) -> None:
    tokenizer = Tokenizer.from_str(byte_level.to_str())
    tokenizer.decoder = decoder
    with pytest.raises(TokenizerError, match=named):
        load_tokenizer(save(tmp_path, tokenizer))


def test_a_tokenizer_without_decoder_is_refused(byte_level: Tokenizer, tmp_path: Path) -> None:
    description = {**json.loads(byte_level.to_str()), "decoder": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(TokenizerError, match="no decoder"):
        load_tokenizer(tmp_path)


def test_truncation_and_padding_asked_for_by_the_file_are_not_done(
    byte_level: Tokenizer, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_str(byte_level.to_str())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    ours = load_tokenizer(save(tmp_path, tokenizer))
    assert ours.decode(ours.encode(SAMPLES[1])) == SAMPLES[1]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ()),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, (2,)),
        ({"config": {"eos_token_id": 0}}, (0,)),
        ({"config": {"text_config": {"eos_token_id": [1, 2]}}}, (1, 2)),
        ({"generation_config": {"eos_token_id": [2, 0]}, "config": {"eos_token_id": 1}}, (2, 0)),
        ({"tokenizer_config": {"eos_token": "!"}, "generation_config": {"eos_token_id": [0, 2]}}, (3, 0, 2)),
        ({"generation_config": {"eos_token_id": [99_999, 1]}}, (1,)),
        ({"special_tokens_map": {"eos_token": {"content": "<|endoftext|>"}}}, (0,)),
    ],
)
def test_end_tokens_come_from_all_places_that_state_them(
    byte_level: Tokenizer, tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert load_tokenizer(save(tmp_path, byte_level, **files)).eos_token_ids == expected


def test_named_tokens_of_the_vocabulary_become_special(byte_level: Tokenizer, tmp_path: Path) -> None:
    config = {
        "pad_token": "Ġthe" if byte_level.token_to_id("Ġthe") else "a",
        "added_tokens_decoder": {
            str(byte_level.token_to_id("b")): {"content": "b", "special": True},
            "599000": {"content": "not in the vocabulary", "special": True},
        },
    }
    ours = load_tokenizer(save(tmp_path, byte_level, tokenizer_config=config))
    assert ours.vocab_size == 500
    assert ours.special_ids == {0, 1, 2, ours.pad_token_id, byte_level.token_to_id("b")}


def test_generation_defaults(byte_level: Tokenizer, tmp_path: Path) -> None:
    stated = {
        "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0,
        "repetition_penalty": 1.1, "max_new_tokens": 2048,
    }  # fmt: skip
    ours = load_tokenizer(save(tmp_path, byte_level, generation_config=stated))
    assert ours.generation_defaults == GenerationDefaults(0.6, 0.95, 20, 0.0, 1.1, 2048)


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        ({"top_p": 3}, "top_p must lie between"),
        ({"eos_token_id": [2, -1]}, "eos_token_id must be an integer"),
    ],
)
def test_wishes_that_cannot_be_meant_are_told_with_their_file(
    stated: dict[str, Any], problem: str, byte_level: Tokenizer, tmp_path: Path
) -> None:
    save(tmp_path, byte_level, generation_config=stated)
    with pytest.raises(TokenizerError, match=rf"{tmp_path}/generation_config\.json: {problem}"):
        load_tokenizer(tmp_path)


def test_chat_templates_are_found_wherever_they_stand(byte_level: Tokenizer, tmp_path: Path) -> None:
    config = {
        "bos_token": "<|im_start|>",
        "chat_template": [
            {"name": "default", "template": "config {{ bos_token }}"},
            {"name": "tool_use", "template": "tools"},
        ],
    }
    folder = save(tmp_path, byte_level, tokenizer_config=config)
    templates = load_tokenizer(folder).chat_templates
    assert templates is not None
    assert tuple(templates.sources) == ("default", "tool_use")
    assert templates.render([]) == "config <|im_start|>"

    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    templates = load_tokenizer(folder).chat_templates
    assert templates is not None
    assert templates.render([]) == "json"

    (folder / "chat_template.jinja").write_text("jinja")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag")
    templates = load_tokenizer(folder).chat_templates
    assert templates is not None
    assert templates.render([]) == "jinja"
    assert templates.sources["rag"] == "rag"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "not valid JSON"),
        ("tokenizer.json", "[]", "JSON object"),
        ("tokenizer.json", "{}", "no tokenizer model"),
        ("tokenizer.json", '{"model": {"type": "Nonsense"}}', "cannot be read"),
        ("tokenizer_config.json", "nonsense", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "does not compile"),
        ("generation_config.json", "\xff", "generation_config.json is not valid JSON"),
        ("config.json", "[" * 100_000, "config.json is not valid JSON"),
    ],
)
def test_broken_files_give_one_clear_error(
    byte_level: Tokenizer, tmp_path: Path, name: str, content: str, message: str
) -> None:
    save(tmp_path, byte_level)
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


def test_a_folder_with_another_kind_of_tokenizer_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x00")
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json \(tokenizer\.model alone"):
        load_tokenizer(tmp_path)


def test_added_tokens_that_are_not_special_are_text(byte_level: Tokenizer, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(byte_level.to_str())
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    ours = load_tokenizer(save(tmp_path, tokenizer))
    ids = ours.encode("<think>é")
    assert ids[0] == 500
    assert ours.decode(ids, skip_special_tokens=True) == "<think>é"
