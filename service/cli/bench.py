"""`slipstream bench`: how fast a running server is, as its clients see it; below it, other measurements."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.bench_plans import plans
from service.cli.connection import EXIT_FAILED, Connection, reporting_failures
from service.cli.flags import spread

if TYPE_CHECKING:
    from service.cli.load import Load, Percentiles, Summary


bench = typer.Typer(invoke_without_command=True)
bench.command("plans")(spread(plans))


@bench.callback()
@spread
def _bench(
    context: typer.Context,
    connection: Connection,
    streams: Annotated[int, typer.Option(help="Requests in flight at once.", min=1)] = 16,
    requests: Annotated[
        int | None, typer.Option(help="Requests in all. Default: four for each stream.", min=1)
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Random tokens in each prompt.", min=1)] = 128,
    max_tokens: Annotated[int, typer.Option(help="Tokens that each request generates.", min=1)] = 128,
    shared_prefix: Annotated[
        int, typer.Option(help="Tokens that all prompts begin with, to see prefix caching at work.", min=0)
    ] = 0,
    temperature: Annotated[float, typer.Option(help="0: greedy.", min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the random prompts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Load a running server and measure tokens/s, time to first token and time between tokens.

    Example: slipstream bench --streams 64 --prompt-tokens 512 --max-tokens 256
    """
    if context.invoked_subcommand is not None:
        return
    from service.cli.load import Load

    load = Load(streams, requests or 4 * streams, prompt_tokens, max_tokens, shared_prefix, temperature, seed)
    with reporting_failures(connection):
        summary = _run(connection, load, show_progress=not as_json)
    if as_json:
        typer.echo(json.dumps(summary.as_json()))
    else:
        _print(summary)
    if summary.errors:
        raise typer.Exit(EXIT_FAILED)


def _run(connection: Connection, load: Load, show_progress: bool) -> Summary:
    import asyncio

    from rich.console import Console
    from rich.progress import Progress

    from service.cli.load import run_load

    with Progress(console=Console(stderr=True), transient=True, disable=not show_progress) as progress:
        task = progress.add_task("requests", total=load.requests)
        return asyncio.run(run_load(connection, load, lambda: progress.advance(task)))


def _print(summary: Summary) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    load = summary.load
    console.print(
        f"{summary.completed} of {load.requests} requests, {load.streams} at once, {load.prompt_tokens} + "
        f"{load.max_tokens} tokens each, in {summary.elapsed_s:.2f} s",
        highlight=False,
    )
    console.print(
        f"[bold]{summary.tokens_per_s:,.0f} tokens/s[/], {summary.requests_per_s:.1f} requests/s, "
        f"{summary.messages:,} messages, {summary.cached_tokens:,} prompt tokens from cache",
        highlight=False,
    )
    table = Table(box=None, header_style="dim", pad_edge=False)
    for title in ("milliseconds", "mean", "p50", "p90", "p99"):
        table.add_column(title, justify="left" if title == "milliseconds" else "right")
    for name, figures in (
        ("time to first token", summary.first_token_ms),
        ("between tokens", summary.inter_token_ms),
        ("whole request", summary.total_ms),
    ):
        table.add_row(name, *_cells(figures))
    console.print(table)
    for code, count in summary.errors.items():
        console.print(f"[red]{count} failed with {code}[/]", highlight=False)


def _cells(figures: Percentiles | None) -> list[str]:
    if figures is None:
        return ["–"] * 4
    return [f"{value:.2f}" for value in (figures.mean, figures.p50, figures.p90, figures.p99)]
