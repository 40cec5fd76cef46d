"""Tokens to text as they come: whole characters only, each as soon as it is whole.

Works on the tokens' bytes, so any number of tokens may share a character. The pieces' concatenation is
exactly what decoding all bytes at once with errors="replace" gives, however the tokens are cut up. Tokens
continue a text, so the space that SentencePiece writes before a word stays.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from service.text.tokenizer import TextTokenizer


class Detokenizer:
    """One sequence's text. Special tokens have none. Work is linear in the tokens; nothing is redone."""

    __slots__ = ("_pending", "_table")

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._table = tokenizer.visible_bytes_table
        self._pending = b""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is whole now. Ids beyond the vocabulary (a model's padding rows) have no text."""
        table = self._table
        try:
            data = b"".join([table[i] for i in token_ids])
        except IndexError:
            data = b"".join([table[i] for i in token_ids if i < len(table)])
        return self.push_bytes(data)

    def push_bytes(self, data: bytes) -> str:
        """The same for bytes of the text."""
        if self._pending:
            data = self._pending + data
        # Bytes that may still become a character stay; others are U+FFFD.
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def finish(self) -> str:
        """U+FFFD if the sequence ends inside a character, else nothing."""
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text

    def mark(self) -> bytes:
        """The state, to go back to: the bytes of an unfinished character."""
        return self._pending

    def rewind(self, mark: bytes) -> None:
        """As if nothing had been pushed since the mark."""
        self._pending = mark
