"""Turns dataclasses into groups of command-line flags, so that a group is described once and used by
several commands. Knows typer, and nothing of the service.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer

_SHORT = {
    "max_sequences": "--max-seqs",
    "max_sequence_length": "--max-len",
    "memory_fraction": "--gpu-memory",
}
"""Second names, the same for every command."""


def names_of(field_name: str) -> tuple[str, ...]:
    """Flags of an engine's option: its name and, of some, a second and shorter one."""
    name = "--" + field_name.replace("_", "-")
    return (name, _SHORT[field_name]) if field_name in _SHORT else (name,)


@dataclass(frozen=True, slots=True)
class Flag:
    """How a field looks on the command line: part of its annotation."""

    help: str
    group: str
    names: tuple[str, ...] = ()
    """Default: the field's name, with dashes."""
    envvar: str | None = None
    metavar: str | None = None


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """A typer command from a function: a parameter whose type is a dataclass becomes that class's flags."""
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
        for name, group in groups.items():
            arguments[name] = group(**{item.name: given.pop(item.name) for item in fields(group)})
        function(**arguments, **given)

    set_signature(command, parameters)
    return command


def set_signature(command: Any, parameters: list[inspect.Parameter]) -> None:
    """Makes typer see these parameters, whatever the function's own."""
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__dict__.pop("__wrapped__", None)


def keyword(name: str, kind: Any, option: Any, default: Any = None) -> inspect.Parameter:
    """A parameter for set_signature; `option`: what typer.Option returned."""
    annotation = Annotated[kind, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameters(group: type) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for item in fields(group):
        kind, flag = get_args(hints[item.name])
        option = typer.Option(
            *flag.names,
            help=flag.help,
            rich_help_panel=flag.group,
            envvar=flag.envvar,
            metavar=flag.metavar,
        )
        yield keyword(item.name, kind, option, item.default)
