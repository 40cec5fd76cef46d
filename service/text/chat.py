"""Chat templates: a conversation to the prompt text that the model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from service.text.errors import ChatTemplateError
from service.text.json_values import plain
from service.text.template_environment import (
    BudgetExceeded,
    ChatTemplateEnvironment,
    RenderLimits,
    bounded,
)

_DEFAULT = "default"
_TOOL_USE = "tool_use"
_RESERVED = frozenset(["messages", "tools", "add_generation_prompt"])

_TEMPLATE_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What a template's own code can raise, beside Jinja's errors, on data it did not expect."""


class ChatTemplates:
    """A model's chat template, or several by name ("default", "tool_use", …)."""

    def __init__(
        self,
        templates: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        limits: RenderLimits | None = None,
    ) -> None:
        """`special_tokens`: template variables such as bos_token, eos_token.

        Raises ChatTemplateError for a template that does not compile.
        """
        sources = {_DEFAULT: templates} if isinstance(templates, str) else dict(templates)
        if not sources:
            raise ChatTemplateError("The model has no chat template.")
        self.sources: Mapping[str, str] = sources
        """The templates as they were given, by name."""
        environment = ChatTemplateEnvironment()
        self._templates = {name: _compile(environment, name, text) for name, text in sources.items()}
        self._special_tokens = dict(special_tokens or {})
        self._limits = limits or RenderLimits()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text; to be tokenized with add_special_tokens=False.

        With several templates, "tool_use" is taken where there are tools and such a template, else
        "default". Client data is made plain and ordered first (json_values).

        Raises ChatTemplateError. CPU-bound, up to RenderLimits: long conversations belong in a thread.
        """
        further = dict(template_kwargs or {})
        taken = sorted(_RESERVED.intersection(further))
        if taken:
            raise ChatTemplateError(f"{', '.join(taken)} cannot be set as a template argument.")
        template = self._select(with_tools=bool(tools))
        variables = {
            **self._special_tokens,
            "documents": None,
            **plain(further),
            "messages": [_without_nones(plain(message)) for message in messages],
            "tools": plain(list(tools)) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._run(template, variables)

    def _select(self, *, with_tools: bool) -> jinja2.Template:
        name = _TOOL_USE if with_tools and _TOOL_USE in self._templates else _DEFAULT
        template = self._templates.get(name)
        if template is None:
            raise ChatTemplateError(
                f"The model has no chat template {name!r}; it has {', '.join(self._templates)}."
            )
        return template

    def _run(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        try:
            with bounded(self._limits) as budget:
                for piece in template.generate(variables):
                    pieces.append(piece)
                    size += len(piece)
                    budget.check_time()
                    if size > self._limits.output_chars:
                        raise BudgetExceeded(f"it is longer than {self._limits.output_chars} characters")
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"The chat template refuses this conversation: {error}") from error
        except _TEMPLATE_FAULTS as error:
            raise ChatTemplateError(
                f"The chat template fails on this conversation: {type(error).__name__}: {error}"
            ) from error
        return "".join(pieces)


def _compile(environment: ChatTemplateEnvironment, name: str, text: str) -> jinja2.Template:
    try:
        return environment.from_string(text)
    except (jinja2.TemplateError, *_TEMPLATE_FAULTS) as error:
        raise ChatTemplateError(f"The chat template {name!r} does not compile: {error}") from error


def _without_nones(message: dict[str, Any]) -> dict[str, Any]:
    """A field set to null means a field left out: many templates would print "None"."""
    return {key: value for key, value in message.items() if value is not None}
