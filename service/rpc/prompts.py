"""A request's prompt to token ids: plain text, a conversation, or ids as they are.

Everything here is synchronous and may take long for a long prompt: the callers move large requests off the
event loop. Knows the tokenizer and the context length, no worker and no RPC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protos.slipstream.v1 import inference_pb2
from service.rpc.sampling import check_token_ids
from service.rpc.structs import struct_to_dict
from service.rpc.violations import Violations
from service.text import ChatTemplateError, TextTokenizer

NORMALIZATION_MARGIN = 4
"""A text may shrink before it is cut into tokens (Unicode composition: at most 3 to 1), so that a text is
only refused unread when it could not fit even so."""

CHARACTERS_PER_TOKEN = 16
"""A text of more characters than so many per token that fits is first read in part: where that part alone is
twice too long, the rest need not be tokenized to know it. (Twice, since a cut word may have more tokens.)"""

MAX_MESSAGES = 16_384
"""A million messages would keep a reading thread busy for seconds before the template even runs."""

RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})
"""Template variables that a Chat has fields for."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready to run."""

    ids: list[int]
    text: str | None
    """As it was tokenized; None where the request gave ids."""
    field: str
    """The request's field that it came from."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A Chat in the plain data that templates take."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    template_kwargs: dict[str, Any]
    add_generation_prompt: bool


class PromptReader:
    """Reads prompts for one model. Thread-safe."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, max_sequence_length: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_sequence_length = max_sequence_length
        longest_token = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
        self._max_characters = max_sequence_length * max(longest_token, 1) * NORMALIZATION_MARGIN

    def read(
        self,
        request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
        violations: Violations,
        add_special_tokens: bool = True,
    ) -> Prompt | None:
        """The request's prompt, or None if anything was reported, here or before."""
        kind = request.WhichOneof("prompt")
        if kind == "text":
            return self._read_text(request.text, "text", add_special_tokens, violations)
        if kind == "chat":
            return self._read_chat(request.chat, violations)
        if kind == "tokens" and isinstance(request, inference_pb2.GenerateRequest):
            return self._read_tokens(request.tokens.ids, violations)
        choices = " or ".join(field.name for field in request.DESCRIPTOR.oneofs_by_name["prompt"].fields)
        violations.add("prompt", f"is not set; give one of {choices}")
        return None

    def _read_text(
        self, text: str, field: str, add_special_tokens: bool, violations: Violations
    ) -> Prompt | None:
        if len(text) > self._max_characters:
            description = (
                f"has {len(text)} characters, which cannot fit in {self._max_sequence_length} tokens"
            )
            violations.add(field, description)
        self._check_beginning(text, field, violations)
        if not violations.is_empty:
            return None
        return Prompt(self._tokenizer.encode(text, add_special_tokens=add_special_tokens), text, field)

    def _check_beginning(self, text: str, field: str, violations: Violations) -> None:
        """Reports a text that is far too long, at the cost of one that is not."""
        n_characters = self._max_sequence_length * CHARACTERS_PER_TOKEN
        if len(text) <= n_characters or not violations.is_empty:
            return
        limit = 2 * self._max_sequence_length
        if len(self._tokenizer.encode(text[:n_characters])) > limit:
            fits = self._max_sequence_length - 1
            violations.add(field, f"is over {limit} tokens long; the most this server takes is {fits}")

    def _read_chat(self, chat: inference_pb2.Chat, violations: Violations) -> Prompt | None:
        templates = self._tokenizer.chat_templates
        if templates is None:
            violations.add("chat", "this model has no chat template; send text or tokens instead")
            return None
        conversation = read_conversation(chat, violations)
        if not violations.is_empty:
            return None
        try:
            text = templates.render(
                conversation.messages,
                tools=conversation.tools or None,
                template_kwargs=conversation.template_kwargs,
                add_generation_prompt=conversation.add_generation_prompt,
            )
        except ChatTemplateError as error:
            violations.add("chat.messages", str(error))
            return None
        return self._read_text(text, "chat", False, violations)

    def _read_tokens(self, field_ids: Sequence[int], violations: Violations) -> Prompt | None:
        if len(field_ids) >= self._max_sequence_length:
            report_too_long("tokens.ids", len(field_ids), self._max_sequence_length, violations)
            return None
        ids = list(field_ids[:])  # a slice is copied in C: half the time of iterating over the field
        check_token_ids("tokens.ids", ids, self._vocab_size, violations)
        return Prompt(ids, None, "tokens.ids") if violations.is_empty else None


def report_too_long(field: str, length: int, max_sequence_length: int, violations: Violations) -> None:
    """`length`: in tokens. One token of the context is left for the answer."""
    violations.add(field, f"is {length} tokens long; the most this server takes is {max_sequence_length - 1}")


def read_conversation(chat: inference_pb2.Chat, violations: Violations) -> Conversation:
    """The plain data of a Chat; what is wrong with it is reported under "chat"."""
    if not chat.messages:
        violations.add("chat.messages", "is empty")
    if len(chat.messages) > MAX_MESSAGES:
        n_messages = len(chat.messages)
        violations.add("chat.messages", f"has {n_messages} messages; at most {MAX_MESSAGES} are allowed")
    messages = []
    for i, message in enumerate(chat.messages[:MAX_MESSAGES]):
        messages.append(_read_message(message, f"chat.messages[{i}]", violations))
        if violations.is_full:
            break
    tools = []
    for i, tool in enumerate(chat.tools):
        tools.append(struct_to_dict(tool, f"chat.tools[{i}]", violations))
        _check_tool(tools[i], f"chat.tools[{i}]", violations)
        if violations.is_full:
            break
    template_kwargs = struct_to_dict(chat.template_kwargs, "chat.template_kwargs", violations)
    for name in RESERVED_VARIABLES & template_kwargs.keys():
        violations.add(f"chat.template_kwargs.{name}", f"is not allowed; use chat.{name}")
    return Conversation(
        messages=messages,
        tools=tools,
        template_kwargs=template_kwargs,
        add_generation_prompt=not chat.HasField("add_generation_prompt") or chat.add_generation_prompt,
    )


def _read_message(message: inference_pb2.Message, path: str, violations: Violations) -> dict[str, Any]:
    if not message.role:
        violations.add(f"{path}.role", 'is empty; give "system", "user", "assistant" or "tool"')
    plain = {"role": message.role, "content": message.content}
    if message.HasField("extra"):
        extra = struct_to_dict(message.extra, f"{path}.extra", violations)
        for name in plain.keys() & extra.keys():
            violations.add(f"{path}.extra.{name}", f"is not allowed; use {path}.{name}")
        plain |= extra
    return plain


def _check_tool(tool: dict[str, Any], path: str, violations: Violations) -> None:
    """A template would render a malformed tool as nonsense that the model then sees."""
    function = tool.get("function")
    if tool.get("type", "function") != "function":
        violations.add(f"{path}.type", 'must be "function"')
    elif not isinstance(function, dict):
        violations.add(f"{path}.function", "must be an object with name, description and parameters")
    elif not isinstance(function.get("name"), str) or not function["name"]:
        violations.add(f"{path}.function.name", "must be a name")
