"""One model's tokenizer: text to token ids and back, special tokens, chat template, defaults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from service.text.chat import ChatTemplates
from service.text.generation import GenerationDefaults


class TextTokenizer:
    """Thread-safe; `encode` releases the GIL, so long texts belong in a thread."""

    name: str
    """Kind of tokenizer, for people, such as "gpt2/smollm" or "Qwen2Tokenizer"."""
    vocab_size: int
    """Ids are 0 … vocab_size − 1. The model may have more rows (padding), never fewer."""
    bos_token_id: int | None
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Tokens that end generation, the tokenizer's own end-of-sequence token first."""
    special_ids: frozenset[int]
    chat_templates: ChatTemplates | None
    generation_defaults: GenerationDefaults

    @property
    def has_chat_template(self) -> bool:
        raise NotImplementedError

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written out in the text become their ids."""
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, not always valid UTF-8; b"" for an id beyond the vocabulary."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of a whole sequence; bytes that are no valid UTF-8 become U+FFFD."""
        raise NotImplementedError


def load_tokenizer(path: Path) -> TextTokenizer:
    """Reads a Hugging Face folder or a .gguf file. Raises TokenizerError."""
    raise NotImplementedError
