"""Chat templates: a conversation to the prompt text that the model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class ChatTemplates:
    """A model's chat template, or several by name ("default", "tool_use", …)."""

    def __init__(
        self, templates: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        """`special_tokens`: template variables such as bos_token, eos_token. Raises ChatTemplateError."""
        raise NotImplementedError

    @property
    def names(self) -> tuple[str, ...]:
        raise NotImplementedError

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        template_name: str | None = None,
    ) -> str:
        """The prompt text; to be tokenized with add_special_tokens=False.

        Raises ChatTemplateError. CPU-bound, up to a stated limit: long conversations belong in a thread.
        """
        raise NotImplementedError
