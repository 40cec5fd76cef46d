"""A tokenizer from a GGUF file's metadata: a `tokenizers` tokenizer built from tokens, merges and scores.

Three kinds: "gpt2" (byte-level BPE), "llama" (SentencePiece BPE, merges implied by scores) and "gemma4"
(SentencePiece-style BPE with merges). Anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from service.text.chat import ChatTemplates
from service.text.errors import ChatTemplateError, TokenizerError
from service.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from service.text.token_bytes import BYTE_LEVEL, METASPACE, ByteDecoder, sentencepiece_decoder
from service.text.tokenizer import TokenizerParts
from worker.client import ModelError, read_gguf_metadata

_END_NAMES = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|endoftext|>",
    "<|end_of_text|>", "<eos>", "</s>",
)  # fmt: skip
"""Control tokens that end a turn or a text, whatever the file calls its end-of-sequence token: a file
names one or two, and the model's generation_config.json, which names all, is not in it."""


class _Vocabulary:
    """The tokenizer's part of the metadata, checked."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.model = self.text("model")
        self.pre = self.text("pre")
        self.tokens: list[str] = self._list("tokens", str)
        if not self.tokens:
            raise TokenizerError("The file holds no tokenizer (tokenizer.ggml.tokens is missing).")
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise TokenizerError("The vocabulary lists a token twice.")
        types = self._list("token_type", int)
        self.types: list[int] = types or [int(TokenType.NORMAL)] * len(self.tokens)
        self.scores: list[float] = [float(s) for s in self._list("scores", (int, float))]
        for name, values in (("token_type", self.types), ("scores", self.scores)):
            if values and len(values) != len(self.tokens):
                raise TokenizerError(
                    f"tokenizer.ggml.{name} has {len(values)} entries for {len(self.tokens)} tokens."
                )

    def text(self, name: str) -> str:
        value = self._metadata.get(f"tokenizer.ggml.{name}", "")
        return value if isinstance(value, str) else ""

    def flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        return bool(value)

    def token_id(self, name: str) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        return value if isinstance(value, int) and 0 <= value < len(self.tokens) else None

    def of_type(self, kind: TokenType) -> list[int]:
        return [i for i, t in enumerate(self.types) if t == kind]

    def merges(self) -> list[tuple[str, str]]:
        """Pairs in order of rank; a token itself may begin with a space, so the split is after it."""
        pairs = []
        for line in self._list("merges", str):
            at = line.find(" ", 1)
            if at < 0:
                raise TokenizerError(f"The merge {line!r} is no pair of tokens.")
            pairs.append((line[:at], line[at + 1 :]))
        if not pairs:
            raise TokenizerError("The file holds no tokenizer.ggml.merges, which this tokenizer needs.")
        return pairs

    def _list(self, name: str, kind: type | tuple[type, ...]) -> list[Any]:
        value = self._metadata.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
            raise TokenizerError(f"tokenizer.ggml.{name} is not a list of the right kind.")
        return value


def read_gguf(path: Path) -> TokenizerParts:
    """Raises TokenizerError."""
    try:
        metadata = read_gguf_metadata(path)
    except ModelError as error:
        raise TokenizerError(str(error)) from error
    try:
        return _read(metadata)
    except (TokenizerError, ChatTemplateError) as error:
        raise TokenizerError(f"{path}: {error}") from error


def _read(metadata: Mapping[str, Any]) -> TokenizerParts:
    vocabulary = _Vocabulary(metadata)
    build = _BUILDERS.get(vocabulary.model)
    if build is None:
        raise TokenizerError(
            f"The tokenizer kind {vocabulary.model!r} is not supported; {', '.join(_BUILDERS)} are."
        )
    tokenizer, decoder, adds_bos = build(vocabulary)
    bos, eos = vocabulary.token_id("bos_token_id"), vocabulary.token_id("eos_token_id")
    adds_eos = vocabulary.flag("add_eos_token", False)
    return TokenizerParts(
        name=f"{vocabulary.model}/{vocabulary.pre}" if vocabulary.pre else vocabulary.model,
        tokenizer=tokenizer,
        decoder=decoder,
        bos_token_id=bos,
        pad_token_id=vocabulary.token_id("padding_token_id"),
        eos_token_ids=_eos_ids(vocabulary),
        prefix_ids=(bos,) if adds_bos and bos is not None else (),
        suffix_ids=(eos,) if adds_eos and eos is not None else (),
        chat_templates=_chat_templates(metadata, vocabulary),
    )


def _eos_ids(vocabulary: _Vocabulary) -> tuple[int, ...]:
    stated = [vocabulary.token_id(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    control = set(vocabulary.of_type(TokenType.CONTROL))
    named = [vocabulary.ids.get(name) for name in _END_NAMES]
    return (
        *(i for i in stated if i is not None),
        *(i for i in named if i is not None and i in control),
    )


def _chat_templates(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> ChatTemplates | None:
    prefix = "tokenizer.chat_template"
    templates = {}
    for key, value in metadata.items():
        if isinstance(value, str) and (key == prefix or key.startswith(f"{prefix}.")):
            templates[key[len(prefix) + 1 :] or "default"] = value
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {short: vocabulary.token_id(f"{long}_token_id") for short, long in names.items()}
    variables = {f"{short}_token": vocabulary.tokens[i] for short, i in ids.items() if i is not None}
    return ChatTemplates(templates, variables) if templates else None


# ---- one builder for each kind: the tokenizer, its decoder, and whether texts begin with bos

_Built = tuple[Tokenizer, ByteDecoder, bool]


def _byte_level(vocabulary: _Vocabulary) -> _Built:
    """GPT-2's scheme: text cut into words, each word's bytes written in a printable alphabet, merged."""
    pre = PRE_TOKENIZERS.get(vocabulary.pre or "default")
    if pre is None:
        raise TokenizerError(
            f"The pre-tokenizer {vocabulary.pre!r} is not supported; {', '.join(sorted(PRE_TOKENIZERS))} are."
        )
    tokenizer = _bpe(vocabulary, vocabulary.merges(), ignore_merges=pre.ignore_merges)
    tokenizer.pre_tokenizer = _splitter(pre)
    if pre.normalizes_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, vocabulary)
    return tokenizer, BYTE_LEVEL, vocabulary.flag("add_bos_token", pre.adds_bos)


def _splitter(pre: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.splits
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def _scored(vocabulary: _Vocabulary) -> _Built:
    """SentencePiece BPE: of all adjacent pairs, the one whose joined token scores best merges first."""
    if not vocabulary.scores:
        raise TokenizerError("The file holds no tokenizer.ggml.scores, which this tokenizer needs.")
    adds_space = vocabulary.flag("add_space_prefix", True)
    tokenizer = _bpe(vocabulary, _merges_from_scores(vocabulary), **_fallback(vocabulary))
    decoder = sentencepiece_decoder(strips_leading_space=adds_space)
    tokenizer = _sentencepiece(tokenizer, vocabulary, adds_space)
    return tokenizer, decoder, vocabulary.flag("add_bos_token", True)


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first, then by the parts' ids."""
    ids = vocabulary.ids
    ranked = []
    for i in vocabulary.of_type(TokenType.NORMAL):
        token = vocabulary.tokens[i]
        for at in range(1, len(token)):
            left, right = ids.get(token[:at]), ids.get(token[at:])
            if left is not None and right is not None:
                ranked.append((-vocabulary.scores[i], left, right))
    ranked.sort()
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, left, right in ranked]


def _merged_sentencepiece(vocabulary: _Vocabulary) -> _Built:
    """Gemma 4: spaces as ▁, bytes as fallback, but with explicit merges.

    Texts always begin with bos: some files state `add_bos_token: false`, and the model derails without.
    """
    tokenizer = _bpe(vocabulary, vocabulary.merges(), **_fallback(vocabulary))
    decoder = sentencepiece_decoder(strips_leading_space=False)
    return _sentencepiece(tokenizer, vocabulary, adds_space=False), decoder, True


_BUILDERS: dict[str, Callable[[_Vocabulary], _Built]] = {
    "gpt2": _byte_level,
    "llama": _scored,
    "gemma4": _merged_sentencepiece,
}


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocabulary.ids, merges, **options))
    except Exception as error:  # the library raises Exception itself
        raise TokenizerError(f"The vocabulary and merges do not fit together: {error}") from error


def _fallback(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Characters without a token become byte tokens; without those, too, the unknown token."""
    unknown = vocabulary.token_id("unknown_token_id")
    return {
        "byte_fallback": True,
        "fuse_unk": True,
        "unk_token": vocabulary.tokens[unknown] if unknown is not None else None,
    }


def _sentencepiece(tokenizer: Tokenizer, vocabulary: _Vocabulary, adds_space: bool) -> Tokenizer:
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(METASPACE)] if adds_space else []
    steps.append(normalizers.Replace(" ", METASPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    _add_tokens(tokenizer, vocabulary)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control tokens are special; user-defined ones are matched in the text but are text themselves."""
    special = [*vocabulary.of_type(TokenType.CONTROL), *vocabulary.of_type(TokenType.UNKNOWN)]
    tokenizer.add_special_tokens(
        [AddedToken(vocabulary.tokens[i], special=True, normalized=False) for i in sorted(special)]
    )
    # One written with ▁ can only be found after spaces have become that.
    tokenizer.add_tokens(
        [
            AddedToken(vocabulary.tokens[i], special=False, normalized=METASPACE in vocabulary.tokens[i])
            for i in vocabulary.of_type(TokenType.USER_DEFINED)
        ]
    )
