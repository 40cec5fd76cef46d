"""`slipstream kernels`: the CUDA kernels, compiled ahead of the first start, and what each of them costs."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.connection import EXIT_FAILED, EXIT_INTERRUPTED, fail

if TYPE_CHECKING:
    from worker.client import KernelBuild, KernelEntry

kernels = typer.Typer(
    no_args_is_help=True, help="Compile the CUDA kernels ahead, or list them. Needs no GPU."
)

_FILE_WIDTH = 120
"""Columns where no terminal says how wide it is."""

ArchFlag = Annotated[
    list[str] | None,
    typer.Option(
        help="Architecture, such as sm_90a; may be repeated. Default: that of the GPU here, else all.",
        metavar="ARCH",
    ),
]
AllFlag = Annotated[bool, typer.Option("--all", help="All architectures that kernels are kept for.")]


@kernels.command("build")
def build(arch: ArchFlag = None, every: AllFlag = False) -> None:
    """Compile the kernels that are not in the cache, so that the first start need not.

    Exit code 1 if one does not compile, or spills registers where its table does not say so.

    Example, while making a container image: slipstream kernels build --arch sm_90a
    """
    from worker.client import KernelToolsError, build_kernels, kernel_cache_folder

    try:
        builds = []
        for name in _architectures(arch, every):
            began = time.perf_counter()
            with _progress_bar(name) as advance:
                done = build_kernels(name, advance)
            builds.append(done)
            typer.echo(_summary(done, time.perf_counter() - began))
        typer.echo(f"in {kernel_cache_folder()}")
    except KernelToolsError as error:
        fail(str(error))
    except KeyboardInterrupt:
        typer.echo("interrupted; what is compiled so far is kept", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    surprises = [one for done in builds for one in done.kernels if one.spill_bytes and not one.may_spill]
    for one in surprises:
        where = f"{one.arch}: {one.name} ({one.source})"
        typer.secho(f"{where} spills {one.spill_bytes} bytes", fg="red", err=True)
    if surprises:
        raise typer.Exit(EXIT_FAILED)


@kernels.command("list")
def list_(
    arch: ArchFlag = None,
    every: AllFlag = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the kernels by family: registers, spills, shared memory, and whether they are compiled already.

    Example: slipstream kernels list --arch sm_90a
    """
    from worker.client import KernelToolsError, list_kernels

    try:
        entries = [entry for name in _architectures(arch, every) for entry in list_kernels(name)]
    except KernelToolsError as error:
        fail(str(error))
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(entry) for entry in entries], indent=1))
        return
    for name, group in groupby(entries, key=lambda entry: entry.arch):
        _print(name, list(group))


def _architectures(arch: Sequence[str] | None, every: bool) -> tuple[str, ...]:
    from worker.client import all_architectures, default_architectures

    if every and arch:
        fail("give either --all or --arch", 2)
    if every:
        return all_architectures()
    return tuple(dict.fromkeys(arch)) if arch else default_architectures()


@contextmanager
def _progress_bar(arch: str) -> Iterator[Callable[[str, int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[unit]}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"compiling for {arch}", total=None, unit="")

        def advance(unit: str, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, unit=unit.replace("[", "\\[")[:60])

        yield advance


def _summary(done: KernelBuild, seconds: float) -> str:
    work = f"compiled {done.compiled} units in {seconds:.1f} s" if done.compiled else "all compiled already"
    kept = done.units - done.compiled
    cached = f", {kept} were in the cache" if done.compiled and kept else ""
    return f"{done.arch}: {len(done.kernels)} kernels in {done.units} units, {work}{cached}"


def _print(arch: str, entries: Sequence[KernelEntry]) -> None:
    from rich.console import Console
    from rich.table import Table

    ready = sum(entry.is_cached for entry in entries)
    table = Table(
        title=f"{arch}: {len(entries)} kernels, {ready} compiled",
        title_justify="left", box=None, header_style="dim", pad_edge=False,
    )  # fmt: skip
    for title in ("family", "kernel", "registers", "spills", "shared", ""):
        is_size = title in ("registers", "spills", "shared")
        table.add_column(title, justify="right" if is_size else "left", no_wrap=True)
    family = ""
    for entry in entries:
        name = entry.family if entry.family != family else ""
        family = entry.family
        sizes = (entry.registers, entry.spill_bytes, entry.shared_bytes)
        cells = ("–" if size is None else f"{size:,}" for size in sizes)
        state = "cached" if entry.is_cached else "not built"
        table.add_row(name, entry.name, *cells, state)
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(table, highlight=False)
