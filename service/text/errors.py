"""What can go wrong between text and tokens. Messages are written for the person who sent the text."""

from __future__ import annotations


class TextError(Exception):
    """Base of the errors of this package."""


class TokenizerError(TextError):
    """The model's tokenizer files are missing, broken, or of a kind that is not supported."""


class ChatTemplateError(TextError):
    """A conversation could not be rendered: no template, a template's own refusal, or bad data."""
