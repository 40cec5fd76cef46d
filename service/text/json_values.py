"""Client data made plain and put in order before a template sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.text.errors import ChatTemplateError

_MAX_DEPTH = 100
_MAX_EXACT_DOUBLE = 2**53

_USUAL_ORDER = {
    name: rank
    for rank, name in enumerate(
        (
            "role", "content", "type", "id", "function", "name", "enum", "items", "description", "parameters",
            "properties", "required", "return", "arguments",
        )
    )
}  # fmt: skip
"""How messages and descriptions of functions are usually written, and so what models saw in training."""


def plain(value: Any, depth: int = 0) -> Any:
    """A copy made of exactly str, int, float, bool, None, list and dict: data without methods of its own.

    Whole floats become ints: JSON over protobuf knows only doubles, and {"limit": 5.0} is not what a model
    was trained to see. Keys are ordered, the usual ones first, the others by
    name: protobuf keeps no order, and the same request must give the same prompt in every process.

    Raises ChatTemplateError for anything else and for nesting beyond 100.
    """
    if depth > _MAX_DEPTH:
        raise ChatTemplateError(f"The conversation's data is nested deeper than {_MAX_DEPTH}.")
    match value:
        case None | bool():
            return value
        case str():
            return str(value)
        case int():
            return int(value)
        case float():
            return int(value) if value.is_integer() and abs(value) <= _MAX_EXACT_DOUBLE else float(value)
        case Mapping():
            return {str(key): plain(value[key], depth + 1) for key in sorted(value, key=_rank)}
        case list() | tuple():
            return [plain(item, depth + 1) for item in value]
    raise ChatTemplateError(f"The conversation holds a {type(value).__name__}, which is no JSON.")


def _rank(key: object) -> tuple[int, str]:
    name = str(key)
    return _USUAL_ORDER.get(name, len(_USUAL_ORDER)), name
