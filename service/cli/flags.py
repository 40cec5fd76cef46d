"""Turns dataclasses into groups of command-line flags, so that a group is described once and used by
several commands. Knows typer, and nothing of the service.

A field's metadata says how it looks: {"help": ..., "group": ..., "flags": (...), "default_help": ...}.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer


def flag(help_text: str, *, group: str, default: Any = None, names: tuple[str, ...] = (), **extra: Any) -> Any:
    """A dataclass field that is a flag. `extra` goes to typer.Option (envvar=..., metavar=...)."""
    return field(default=default, metadata={"help": help_text, "group": group, "flags": names, "extra": extra})


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """A typer command from a function: each parameter whose type is a dataclass becomes that class's flags."""
    hints = get_type_hints(function, include_extras=True)
    signature = inspect.signature(function)
    groups = {name: kind for name, kind in hints.items() if is_dataclass(kind) and isinstance(kind, type)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name in groups:
            parameters.extend(_parameters(groups[name]))
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def command(**given: Any) -> None:
        arguments = {}
        for name in signature.parameters:
            if name in groups:
                values = {item.name: given.pop(item.name) for item in fields(groups[name])}
                arguments[name] = groups[name](**values)
        function(**arguments, **given)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del command.__wrapped__  # type: ignore[attr-defined]
    return command


def _parameters(group: type) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group)
    for item in fields(group):
        yield inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(item),
            annotation=Annotated[hints[item.name], _typer_option(item)],
        )


def _default(item: Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    return item.default


def _typer_option(item: Field[Any]) -> Any:
    meta = item.metadata
    return typer.Option(
        *meta.get("flags", ()), help=meta["help"], rich_help_panel=meta["group"], **meta.get("extra", {})
    )
