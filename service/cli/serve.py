"""`slipstream serve`: flags to options, then the main process."""

from __future__ import annotations

import inspect
import os
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import typer

from service.cli.connection import fail
from service.cli.flags import keyword, names_of, set_signature
from service.options import (
    ENVIRONMENT_PREFIX,
    LoadedOptions,
    OptionField,
    OptionsError,
    flag_name,
    load_options,
    option_fields,
)

_HELP = """Serve a model over gRPC. Ctrl-C lets running requests finish; a second one stops at once.

Examples:

  slipstream serve --model smollm2-135m-instruct

  slipstream serve --model Qwen/Qwen3-8B --host 0.0.0.0 --fronts 4

  slipstream serve --config server.toml --show-config

Each option may also come from the environment (SLIPSTREAM_MAX_QUEUED=512) or from a TOML file
(max-queued = 512); flags win over the environment, and that over the file.
"""


def _serve(config: Path | None, show_config: bool, **flags: Any) -> None:
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        loaded = load_options(given, os.environ, config)
    except OptionsError as error:
        fail(str(error), 2)
    if show_config:
        _print_options(loaded)
        return
    if not loaded.options.model:
        fail("no model given; for a first try: slipstream serve --model smollm2-135m-instruct", 2)
    for warning in loaded.warnings:
        typer.secho(f"warning: {warning}", fg="yellow", err=True)
    from service.serve import serve

    raise typer.Exit(serve(loaded.options))


def _print_options(loaded: LoadedOptions) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("option", "value", "from", box=None, header_style="dim", pad_edge=False)
    for item in option_fields():
        value = getattr(loaded.options, item.name)
        shown = "–" if value in (None, "") else str(value)
        table.add_row(flag_name(item.name)[2:], shown, loaded.sources[item.name])
    Console().print(table)
    for warning in loaded.warnings:
        typer.secho(f"warning: {warning}", fg="yellow", err=True)


def _command() -> Any:
    """_serve with one flag for each field of ServeOptions. A flag that is not given is None, so that the
    environment and the file can say."""

    def command(**given: Any) -> None:
        _serve(**given)

    config = typer.Option(
        "--config", help="TOML file with options.", metavar="FILE", envvar=f"{ENVIRONMENT_PREFIX}CONFIG"
    )
    show = typer.Option("--show-config", help="Print every option, its value and its source, and stop.")
    parameters = [keyword("config", Path | None, config), keyword("show_config", bool, show, False)]
    set_signature(command, [*parameters, *map(_flag, option_fields())])
    command.__doc__ = _HELP
    return command


def _flag(item: OptionField) -> inspect.Parameter:
    flag = flag_name(item.name)
    names = (f"{flag}/--no-{flag[2:]}",) if item.kind is bool else names_of(item.name)
    option = typer.Option(
        *names,
        help=item.about.help + _default(item.default),
        rich_help_panel=item.about.group,
        show_default=False,
    )
    is_optional = get_origin(item.kind) in (Union, types.UnionType) and type(None) in get_args(item.kind)
    return keyword(item.name, item.kind if is_optional else item.kind | None, option)


def _default(value: Any) -> str:
    """As words: what typer itself would show stands in brackets, as a computed value would."""
    if value in (None, ""):
        return ""
    return f" Default: {'on' if value is True else 'off' if value is False else value}."


serve_command = _command()
