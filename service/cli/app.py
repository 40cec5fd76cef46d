"""The command line's table of contents: which commands there are, and in which order help shows them."""

from __future__ import annotations

import os
from collections.abc import Callable

import typer

from service.cli import control, generate, tokenize
from service.cli.bench import bench
from service.cli.flags import spread
from service.cli.inspect import inspect
from service.cli.kernels import kernels
from service.cli.plan import plan
from service.cli.serve import serve_command

_HELP = """Serve large language models over gRPC, and talk to such a server.

Start here, in two terminals:

    slipstream serve --model smollm2-135m-instruct

    slipstream chat "Why is the sky blue?"
"""

app = typer.Typer(
    name="slipstream",
    help=_HELP,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_SERVING, _TALKING, _OPERATING = "Serve", "Talk to a server", "Look after a server"

app.command("serve", rich_help_panel=_SERVING)(serve_command)
app.command("inspect", rich_help_panel=_SERVING)(inspect)
app.command("plan", rich_help_panel=_SERVING)(spread(plan))
app.add_typer(kernels, name="kernels", rich_help_panel=_SERVING)
_COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    _TALKING: (generate.generate, generate.chat, tokenize.tokenize),
    _OPERATING: (
        control.status,
        control.metrics,
        control.health,
        control.profile,
        control.drain,
        control.abort,
    ),
}
for _panel, _functions in _COMMANDS.items():
    for _function in _functions:
        app.command(_function.__name__, rich_help_panel=_panel)(spread(_function))
app.add_typer(bench, name="bench", rich_help_panel=_TALKING)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version.")
) -> None:
    if version:
        from importlib.metadata import version as installed_version

        typer.echo(installed_version("slipstream-serve"))
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def run() -> None:
    """Runs the command that the arguments name."""
    # gRPC's C core writes lines of its own to stderr, such as one for each failed TLS handshake; they are no
    # log events, and what they tell is told by errors. It reads its level from here alone, when it is loaded.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    app()
