"""How byte-level BPE tokenizers cut text into words before merging: one entry per name GGUF files use.

The expressions are facts about the models (each is in the tokenizer.json its authors published); a name
that is not here is refused, since a wrong cut gives a model that works, badly.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PREFIX = r"[^\r\n\p{L}\p{N}]?"
_CASED_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _TAIL,
)


def _words(digits: str) -> str:
    """Words, runs of `digits`, punctuation, white space: the scheme most models since 2023 share."""
    return rf"{_CONTRACTIONS}|{_PREFIX}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"


def _cased_words(digits: str, contractions: str) -> str:
    """The same with words also cut where capitals follow small letters."""
    return (
        rf"{_PREFIX}{_UPPER}*{_LOWER}+{contractions}|{_PREFIX}{_UPPER}+{_LOWER}*{contractions}"
        rf"|{digits}|{_CASED_PUNCTUATION}|{_TAIL}"
    )


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way of cutting text into words."""

    splits: tuple[str, ...]
    """Regular expressions, each applied to the pieces the one before left; matches and the text between
    them become pieces."""
    ignore_merges: bool = False
    """A word that is a token as a whole is taken without going through the merges."""
    adds_bos: bool = False
    """Whether texts begin with the beginning-of-sequence token if the file does not say."""
    normalizes_nfc: bool = False
    """Whether text is put into Unicode's composed form first."""


_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True, adds_bos=True)
_WORDS_3_DIGITS = PreTokenizer((_words(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer((_words(_DIGIT),), normalizes_nfc=True)
_WORDS_1_DIGIT = PreTokenizer((_words(_DIGIT),))
_QWEN35 = PreTokenizer(
    (
        rf"{_CONTRACTIONS}|{_PREFIX}[\p{{L}}\p{{M}}]+|{_DIGIT}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}",
    ),
    normalizes_nfc=True,
)
_WORDS_GPT2 = PreTokenizer((_GPT2,))
_DIGITS_THEN_GPT2 = PreTokenizer((_DIGIT, _GPT2))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _WORDS_GPT2,
    "phi-2": _WORDS_GPT2,
    "mpt": _WORDS_GPT2,
    "olmo": _WORDS_GPT2,
    "exaone4": _WORDS_GPT2,
    "trillion": _WORDS_GPT2,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "command-r": _DIGITS_THEN_GPT2,
    "codeshell": _DIGITS_THEN_GPT2,
    "exaone": _DIGITS_THEN_GPT2,
    "minerva-7b": _DIGITS_THEN_GPT2,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": _WORDS_3_DIGITS,
    "smaug-bpe": _WORDS_3_DIGITS,
    "glm4": _WORDS_3_DIGITS,
    "chatglm-bpe": _WORDS_3_DIGITS,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "stablelm2": _WORDS_1_DIGIT,
    "hunyuan": _WORDS_1_DIGIT,
    "qwen35": _QWEN35,
    "deepseek-v3": PreTokenizer(_DEEPSEEK_V3),
    "hunyuan-dense": PreTokenizer(_DEEPSEEK_V3),
    "tekken": PreTokenizer((_cased_words(_DIGIT, ""),), ignore_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer((_cased_words(r"\p{N}{1,3}", _CONTRACTIONS + "?"),)),
    "llama4": PreTokenizer((_cased_words(r"\p{N}{1,3}", _CONTRACTIONS + "?"),)),
}
"""By the value of GGUF's `tokenizer.ggml.pre`."""
