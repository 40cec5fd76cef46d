"""One model's tokenizer: text to token ids and back, special tokens, chat template, defaults.

Knows nothing of files: loading.py makes it of what hf_folder.py or gguf_file.py found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from service.text.chat import ChatTemplates
from service.text.errors import TokenizerError
from service.text.token_bytes import ByteDecoder, build_table
from worker.client import GenerationDefaults

_SHORT = 256
"""Characters. Above it the batch call pays, which leaves out the character offsets that nobody here reads:
25 % less at 1,000 characters, but 34 µs more on a few words."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a loader found."""

    name: str
    tokenizer: Tokenizer
    decoder: ByteDecoder
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    prefix_ids: tuple[int, ...] = ()
    """Put before every text with add_special_tokens, besides what the tokenizer's post-processor adds."""
    suffix_ids: tuple[int, ...] = ()
    chat_templates: ChatTemplates | None = None
    generation_defaults: GenerationDefaults = field(default_factory=GenerationDefaults)


class TextTokenizer:
    """Thread-safe; `encode` lets other threads run meanwhile, so long texts belong in a thread."""

    name: str
    """Kind of tokenizer, for people, such as "gpt2/smollm" or "Qwen2Tokenizer"."""
    vocab_size: int
    """Ids are 0 … vocab_size − 1. The model may have more rows (padding), never fewer."""
    bos_token_id: int | None
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Tokens that end generation, the tokenizer's own end-of-sequence token first."""
    special_ids: frozenset[int]
    """Tokens whose text is no text: left out of output."""
    chat_templates: ChatTemplates | None
    generation_defaults: GenerationDefaults
    bytes_table: list[bytes]
    """Each token's own bytes, by id. Not to be changed."""
    visible_bytes_table: list[bytes]
    """The same with b"" for special tokens. Not to be changed."""
    strips_leading_space: bool
    """Whether one space at the very start of a text is not part of it (SentencePiece)."""

    def __init__(self, parts: TokenizerParts) -> None:
        added = parts.tokenizer.get_added_tokens_decoder()
        vocabulary: dict[str, int] = parts.tokenizer.get_vocab(with_added_tokens=False)
        self.name = parts.name
        self.bytes_table = build_table(
            vocabulary, {i: token.content for i, token in added.items()}, parts.decoder
        )
        self.vocab_size = len(self.bytes_table)
        if self.vocab_size == 0:
            raise TokenizerError("The tokenizer has no tokens.")
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.visible_bytes_table = [
            b"" if i in self.special_ids else piece for i, piece in enumerate(self.bytes_table)
        ]
        self.strips_leading_space = parts.decoder.strips_leading_space
        self.bos_token_id = self._known(parts.bos_token_id)
        self.pad_token_id = self._known(parts.pad_token_id)
        self.eos_token_ids = tuple(dict.fromkeys(i for i in parts.eos_token_ids if i < self.vocab_size))
        self.chat_templates = parts.chat_templates
        self.generation_defaults = parts.generation_defaults
        self._tokenizer = parts.tokenizer
        self._prefix_ids = list(parts.prefix_ids)
        self._suffix_ids = list(parts.suffix_ids)

    def _known(self, token_id: int | None) -> int | None:
        return token_id if token_id is not None and token_id < self.vocab_size else None

    @property
    def has_chat_template(self) -> bool:
        return self.chat_templates is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written out in the text become their ids.

        Raises ValueError for text that is no valid Unicode (lone surrogates).
        """
        if len(text) < _SHORT:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        if add_special_tokens and (self._prefix_ids or self._suffix_ids):
            return self._prefix_ids + ids + self._suffix_ids
        return ids

    def to_json(self) -> str:
        """The tokenizer in the form of a Hugging Face tokenizer.json, prefix and suffix included."""
        if not self._prefix_ids and not self._suffix_ids:
            return str(self._tokenizer.to_str())
        copy = Tokenizer.from_str(self._tokenizer.to_str())
        names = {i: copy.id_to_token(i) for i in (*self._prefix_ids, *self._suffix_ids)}
        copy.post_processor = TemplateProcessing(
            single=[*(names[i] for i in self._prefix_ids), "$A", *(names[i] for i in self._suffix_ids)],
            special_tokens=[(name, i) for i, name in names.items()],
        )
        return str(copy.to_str())

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, not always valid UTF-8; b"" for an id beyond the vocabulary."""
        return self.bytes_table[token_id] if 0 <= token_id < self.vocab_size else b""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of a whole sequence; bytes that are no valid UTF-8 become U+FFFD."""
        table = self.visible_bytes_table if skip_special_tokens else self.bytes_table
        size = self.vocab_size
        data = b"".join([table[i] for i in ids if 0 <= i < size])
        if self.strips_leading_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")
