"""Text in, text out: tokenizers, chat templates, incremental detokenizing and stop strings.

Knows token ids and strings; knows no request, no RPC, no queue and no model weights.
"""

from service.text.chat import ChatTemplates
from service.text.errors import ChatTemplateError, TextError, TokenizerError
from service.text.export import hugging_face_files
from service.text.loading import load_tokenizer
from service.text.stops import StopSet
from service.text.stream import Delta, OutputText
from service.text.tokenizer import TextTokenizer

__all__ = [
    "ChatTemplateError",
    "ChatTemplates",
    "Delta",
    "OutputText",
    "StopSet",
    "TextError",
    "TextTokenizer",
    "TokenizerError",
    "hugging_face_files",
    "load_tokenizer",
]
