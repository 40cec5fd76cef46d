"""Tokenizers from GGUF files: against the ones the files were made of, and against plain BPE in Python."""

from __future__ import annotations

import itertools
import random
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import TokenType
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from service.text import TextTokenizer, TokenizerError, load_tokenizer
from service.text.pretokenizers import PRE_TOKENIZERS
from service.text.token_bytes import byte_level_alphabet
from tests.unit.text_tools import SAMPLES, gguf_of, texts, trained_byte_level, write_gguf
from worker.client import read_gguf_metadata

NORMAL, CONTROL, USER, BYTE = (
    int(kind) for kind in (TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.BYTE)
)

Pair = tuple[TextTokenizer, Tokenizer]


def pair(folder: Path, pre: str, original: pre_tokenizers.PreTokenizer) -> Pair:
    tokenizer = trained_byte_level(original)
    return load_tokenizer(gguf_of(tokenizer, folder / "model.gguf", pre)), tokenizer


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair(tmp_path_factory.mktemp("gpt2"), "gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False))


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The original cuts with code, not with an expression: single digits, then GPT-2's words."""
    original = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return pair(tmp_path_factory.mktemp("smollm"), "smollm", original)


@given(text=texts)
def test_gpt2_encodes_as_the_original(gpt2: Pair, text: str) -> None:
    ours, original = gpt2
    assert ours.encode(text) == original.encode(text).ids
    assert ours.decode(ours.encode(text)) == text


@given(text=texts)
def test_smollm_encodes_as_the_original(smollm: Pair, text: str) -> None:
    ours, original = smollm
    assert ours.encode(text) == original.encode(text).ids
    assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("text", SAMPLES)
def test_samples_encode_as_the_original(gpt2: Pair, smollm: Pair, text: str) -> None:
    for ours, original in (gpt2, smollm):
        assert ours.encode(text) == original.encode(text).ids


def words(pre: str, text: str, folder: Path) -> list[str]:
    """How a pre-tokenizer cuts a text: a vocabulary without merges but with every word shows it."""
    original = trained_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer = load_tokenizer(gguf_of(original, folder / f"{pre}.gguf", pre))
    cut = tokenizer._tokenizer.pre_tokenizer.pre_tokenize_str(text)
    alphabet = byte_level_alphabet()
    return [bytes(alphabet[c] for c in word).decode() for word, _ in cut]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "It's 12345  x", ["It", "'s", " 12345", " ", " x"]),
        ("smollm", "a12 3½b", ["a", "1", "2", " ", "3", "½", "b"]),
        ("starcoder", "v2.0", ["v", "2", ".", "0"]),
        ("llama-bpe", "It'S 1234567 ok", ["It", "'S", " ", "123", "456", "7", " ok"]),
        ("llama-bpe", "a\n\n b!\n", ["a", "\n\n", " b", "!\n"]),
        ("qwen2", "x=12 (foo)", ["x", "=", "1", "2", " (", "foo", ")"]),
        ("qwen2", "e\u0301a", ["e", "\u0301a"]),
        ("qwen35", "e\u0301a", ["e\u0301a"]),
        ("tekken", "camelCaseWORD", ["camel", "Case", "WORD"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("deepseek-v3", "ab日本12345 .x", ["ab", "日本", "123", "45", " .", "x"]),
        ("default", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
    ],
)
def test_words(pre: str, text: str, expected: list[str], tmp_path: Path) -> None:
    assert words(pre, text, tmp_path) == expected


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_all_text(pre: str, tmp_path: Path) -> None:
    original = trained_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer = load_tokenizer(gguf_of(original, tmp_path / "model.gguf", pre))
    for text in SAMPLES:
        expected = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].normalizes_nfc else text
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == expected


def test_a_word_that_is_a_token_needs_no_merges_where_the_model_says_so(tmp_path: Path) -> None:
    tokens = [*byte_level_alphabet(), "xy", "xyz"]
    for pre, expected in (("llama-bpe", [257]), ("gpt-2", [256, tokens.index("z")])):
        path = write_gguf(tmp_path / f"{pre}.gguf", tokens, pre=pre, merges=[("x", "y")])
        assert load_tokenizer(path).encode("xyz") == expected


# ---- SentencePiece


def greedy_by_score(text: str, ids: dict[str, int], scores: list[float]) -> list[int]:
    """SentencePiece's BPE, written down plainly: join the pair whose token scores best, leftmost first."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        joins = [
            (-scores[ids[a + b]], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in ids
        ]
        if not joins:
            break
        _, at = min(joins)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    out: list[int] = []
    for symbol in symbols:
        known = ids.get(symbol)
        out += [known] if known is not None else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return out


@pytest.fixture(scope="module")
def sentencepiece_vocabulary() -> tuple[list[str], list[int], list[float]]:
    """Tokens, types and scores as Llama 2's file has them: unk, bos, eos, bytes, joined words, letters."""
    letters = "▁abcdeé日"
    generator = random.Random(7)
    joined: list[str] = []
    parts = list(letters)
    while len(joined) < 120:
        token = generator.choice(parts) + generator.choice(parts)
        if len(token) <= 6 and token not in parts:
            joined.append(token)
            parts.append(token)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *joined, *letters]
    types = [int(TokenType.UNKNOWN), CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 259)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    return tokens, types, scores


@pytest.fixture(scope="module")
def sentencepiece(
    sentencepiece_vocabulary: tuple[list[str], list[int], list[float]],
    tmp_path_factory: pytest.TempPathFactory,
) -> TextTokenizer:
    tokens, types, scores = sentencepiece_vocabulary
    path = tmp_path_factory.mktemp("spm") / "model.gguf"
    write_gguf(
        path, tokens, model="llama", pre="default", types=types, scores=scores,
        bos_token_id=1, eos_token_id=2, unknown_token_id=0,
    )  # fmt: skip
    return load_tokenizer(path)


@given(text=st.text("abcde é日xö", max_size=24))
def test_sentencepiece_encodes_as_by_hand(
    sentencepiece: TextTokenizer,
    sentencepiece_vocabulary: tuple[list[str], list[int], list[float]],
    text: str,
) -> None:
    tokens, _, scores = sentencepiece_vocabulary
    ids = {token: i for i, token in enumerate(tokens)}
    expected = [1, *(greedy_by_score(text, ids, scores) if text else [])]
    assert sentencepiece.encode(text) == expected
    assert sentencepiece.decode(expected, skip_special_tokens=True) == text


def test_sentencepiece_metadata(sentencepiece: TextTokenizer) -> None:
    assert (sentencepiece.bos_token_id, sentencepiece.eos_token_ids) == (1, (2,))
    assert sentencepiece.special_ids == {0, 1, 2}
    assert sentencepiece.token_bytes(3 + 0xE2) == b"\xe2"


def test_no_space_is_put_before_a_text_where_the_file_says_so(
    sentencepiece_vocabulary: tuple[list[str], list[int], list[float]], tmp_path: Path
) -> None:
    tokens, types, scores = sentencepiece_vocabulary
    path = write_gguf(
        tmp_path / "model.gguf", [*tokens, "\n\n", "▁▁▁"], model="llama", pre="default",
        types=[*types, USER, USER], scores=[*scores, 0.0, 0.0],
        add_space_prefix=False, add_bos_token=False, bos_token_id=1, eos_token_id=2, eot_token_id=1,
    )  # fmt: skip
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("a\n\n") == [tokens.index("a"), len(tokens)]
    assert tokenizer.encode("   b") == [len(tokens) + 1, tokens.index("b")]
    assert tokenizer.decode(tokenizer.encode("   b")) == "   b"
    assert tokenizer.eos_token_ids == (2, 1)


def test_gemma4_merges_are_read_and_bos_is_always_added(tmp_path: Path) -> None:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<pad>", "<eos>", "<bos>", *byte_tokens, "▁", "a", "b", "▁a", "▁ab"]
    types = [CONTROL] * 3 + [BYTE] * 256 + [NORMAL] * 5
    path = write_gguf(
        tmp_path / "model.gguf", tokens, model="gemma4", pre=None, types=types,
        merges=[("▁", "a"), ("▁a", "b")], bos_token_id=2, eos_token_id=1, add_bos_token=False,
    )  # fmt: skip
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode(" aba ö") == [2, 263, 260, 259, 3 + 0xC3, 3 + 0xB6]
    assert tokenizer.decode(tokenizer.encode(" aba ö"), skip_special_tokens=True) == " aba ö"


# ---- special tokens, templates, refusals


def test_special_tokens_template_and_bos(tmp_path: Path) -> None:
    original = trained_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    path = gguf_of(
        original, tmp_path / "model.gguf", "gpt-2", bos_token_id=1, eos_token_id=2, padding_token_id=0,
        add_bos_token=True, add_eos_token=True, chat_template="{{ bos_token }}{{ messages[0].content }}",
    )  # fmt: skip
    tokenizer = load_tokenizer(path)
    inner = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [1, *inner, 2]
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (1, 0)
    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.name == "gpt2/gpt-2"
    assert tokenizer.chat_templates is not None
    assert tokenizer.chat_templates.render([{"role": "user", "content": "x"}]) == "<|im_start|>x"


def test_user_defined_tokens_are_text(tmp_path: Path) -> None:
    tokens = [*byte_level_alphabet(), "ab", "<think>", "<|end|>"]
    types = [*[NORMAL] * 257, USER, CONTROL]
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", tokens, types=types, merges=[("a", "b")]))
    ids = tokenizer.encode("ab<think>a<|end|>")
    assert ids[:2] == [256, 257]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<think>a"
    assert tokenizer.eos_token_ids == (258,)


TOKENS = [*byte_level_alphabet(), "ab"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: write_gguf(p, TOKENS, pre="klingon", merges=[("a", "b")]), "'klingon' is not .*qwen2"),
        (lambda p: write_gguf(p, TOKENS, model="bert"), "'bert' is not supported; gpt2, llama, gemma4 are"),
        (lambda p: write_gguf(p, TOKENS, model="t5"), "'t5' is not supported"),
        (lambda p: write_gguf(p, TOKENS), "merges"),
        (lambda p: write_gguf(p, TOKENS, merges=[("a", "c")]), "do not fit together"),
        (lambda p: write_gguf(p, [*TOKENS, "ab"], merges=[("a", "b")]), "twice"),
        (lambda p: write_gguf(p, TOKENS, types=[1, 2], merges=[("a", "b")]), "token_type has 2 entries"),
        (lambda p: write_gguf(p, TOKENS, model="llama"), "scores"),
        (lambda p: write_gguf(p, TOKENS, merges=[("a", "b")], chat_template="{% for %}"), "does not compile"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    make: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    path = make(tmp_path / "model.gguf")
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


# ---- the real model


_ASCII_WORDS = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


def plain_bpe(text: str, ids: dict[str, int], ranks: dict[tuple[str, str], int]) -> list[int]:
    """Byte-level BPE written down plainly, for text of ASCII letters, digits, spaces and punctuation."""
    alphabet = {byte: char for char, byte in byte_level_alphabet().items()}
    out = []
    for fragment in re.findall(r"[0-9]|[^0-9]+", text):
        for word in _ASCII_WORDS.findall(fragment):
            symbols = [alphabet[byte] for byte in word.encode()]
            while len(symbols) > 1:
                pairs = enumerate(itertools.pairwise(symbols))
                rank, at = min((ranks.get(pair, len(ranks)), i) for i, pair in pairs)
                if rank == len(ranks):
                    break
                symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
            out += [ids[symbol] for symbol in symbols]
    return out


@pytest.fixture(scope="module")
def real(demo_model: Path) -> TextTokenizer:
    return load_tokenizer(demo_model)


def test_the_real_model(real: TextTokenizer) -> None:
    assert (real.name, real.vocab_size) == ("gpt2/smollm", 49_152)
    assert (real.bos_token_id, real.pad_token_id, real.eos_token_ids) == (1, 2, (2, 0))
    assert real.special_ids == set(range(17))
    assert real.encode("<|im_start|>user\n<|im_end|>")[0] == 1
    assert [real.token_bytes(i) for i in real.encode("12 345")] == [b"1", b"2", b" ", b"3", b"4", b"5"]
    assert real.chat_templates is not None
    prompt = real.chat_templates.render([{"role": "user", "content": "Hi"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = real.encode(prompt, add_special_tokens=False)
    assert [ids.count(1), ids.count(2)] == [3, 2]


@given(text=texts)
def test_the_real_model_keeps_any_text_its_bytes_can_spell(real: TextTokenizer, text: str) -> None:
    """Its vocabulary lacks 21 of the 256 bytes (rare controls, unused planes); those are lost."""
    singles = set(real.bytes_table)
    spelled = "".join(char for char in text if all(bytes([b]) in singles for b in char.encode()))
    assert real.decode(real.encode(spelled)) == spelled


def test_the_real_model_encodes_as_plain_bpe(real: TextTokenizer, demo_model: Path) -> None:
    metadata = read_gguf_metadata(demo_model)
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(line.split(" ", 1)): i for i, line in enumerate(metadata["tokenizer.ggml.merges"])}
    source = Path(__file__).read_text().replace("<|", "<").encode("ascii", "ignore").decode()
    for text in (source, "  indented   text\n\n\nIt's we'll 2024-12-01 'quoted' I'd\t\tx  "):
        assert real.encode(text) == plain_bpe(text, ids, ranks)
