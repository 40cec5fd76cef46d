"""Tokenizers made in milliseconds for the text tests, and oracles to hold them to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from service.text import TextTokenizer
from service.text.token_bytes import BYTE_LEVEL, byte_level_alphabet, sentencepiece_decoder
from service.text.tokenizer import TokenizerParts

SAMPLES = (
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock, isn't it?\n\n  Indented\tcode();\r\n",
    "Über die Straße gehen 3,14159 Menschen — naïve façade, Ελληνικά, русский, עברית, العربية, हिन्दी.",
    "日本語の文章と한국어 텍스트、汉字。 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 é (combining e\u0301) ①②③ ½ ٣٤٥ Ⅷ",
    "def main():\n    return {'a': [1, 2, 3]}  # comment\n\n\n<|im_start|>user\n",
)

EMOJI = ("👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇨🇭", "é", "日本語", "\u00a0", "\u200d", "\ufffd", "𝔘𝔫𝔦", "नमस्ते")

# Any Unicode scalar value, short texts, with emoji built of many characters more often than chance has it.
texts = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(EMOJI)), max_size=12).map("".join)


@st.composite
def cuts(draw: st.DrawFn, items: Sequence[Any]) -> list[Sequence[Any]]:
    """The items in order, cut into consecutive pieces, some of them empty."""
    marks = sorted(draw(st.lists(st.integers(0, len(items)), max_size=8)))
    return [items[a:b] for a, b in zip([0, *marks], [*marks, len(items)], strict=True)]


def byte_tokenizer(extra: Iterable[str] = (), special: Iterable[str] = ("<|end|>",)) -> TextTokenizer:
    """Token i is the byte i, for i below 256; then `extra` (non-special added tokens), then `special`."""
    tokenizer = Tokenizer(models.BPE(byte_level_alphabet(), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in extra])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return TextTokenizer(TokenizerParts("bytes", tokenizer, BYTE_LEVEL))


def sentencepiece_tokenizer() -> TextTokenizer:
    """Tokens 0 … 255 are byte tokens; then ▁, ▁the, ▁▁, a, b, é, 日."""
    words = ["▁", "▁the", "▁▁", "a", "b", "é", "日"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {word: 256 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="a"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = sentencepiece_reference_decoder()
    decoder = sentencepiece_decoder(strips_leading_space=True)
    return TextTokenizer(TokenizerParts("sentencepiece", tokenizer, decoder))


def sentencepiece_reference_decoder() -> decoders.Decoder:
    """As Llama 2's tokenizer.json has it."""
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def trained_byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """A byte-level BPE of a few hundred merges with the ChatML tokens as ids 0, 1, 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLES * 3, trainer)
    return tokenizer


def merges_of(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    model = json.loads(tokenizer.to_str())["model"]
    return [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ", 1)) for pair in model["merges"]]


def write_gguf(
    path: Path,
    tokens: Sequence[str],
    *,
    model: str = "gpt2",
    pre: str | None = "gpt-2",
    types: Sequence[int] | None = None,
    merges: Sequence[tuple[str, str]] | None = None,
    scores: Sequence[float] | None = None,
    **metadata: Any,
) -> Path:
    """A GGUF file with a tokenizer and no tensors. Underscores of `metadata` names are kept."""
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types) if types is not None else [int(TokenType.NORMAL)] * len(tokens))
    if merges is not None:
        writer.add_token_merges([f"{left} {right}" for left, right in merges])
    if scores is not None:
        writer.add_token_scores(list(scores))
    for name, value in metadata.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key if name != "chat_template" else "tokenizer.chat_template", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def gguf_of(tokenizer: Tokenizer, path: Path, pre: str, **metadata: Any) -> Path:
    """A byte-level tokenizer of trained_byte_level() as a GGUF file."""
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    types = [int(TokenType.CONTROL)] * 3 + [int(TokenType.NORMAL)] * (len(tokens) - 3)
    return write_gguf(path, tokens, pre=pre, types=types, merges=merges_of(tokenizer), **metadata)
