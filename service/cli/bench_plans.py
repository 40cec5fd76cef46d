"""`slipstream bench plans`: which way each of a model's matrix products takes, and how fast it is there."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.connection import fail
from service.cli.plan import PlannedDevice, PlannedOptions, find_model

if TYPE_CHECKING:
    from worker.client import DeviceFigures, EngineOptions, ProductFigure

_PIPE_WIDTH = 200


def plans(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder, a .gguf file, a config.json alone, a Hugging Face id or a demo model's name.",
            show_default=False,
        ),
    ],
    options: PlannedOptions,
    device: PlannedDevice,
    rows: Annotated[
        list[int] | None,
        typer.Option(
            help="Rows of a step; may be repeated. Default: 1, 2, 4 … 8192.", show_default=False, min=1
        ),
    ] = None,
    arms_only: Annotated[bool, typer.Option("--arms-only", help="Measure nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Print how each matrix product of a model is computed at each number of rows, and how fast.

    Rows are a step's sequences, or its prompt tokens. On a GPU every product is timed as the engine runs it,
    in a graph through all layers with random weights, together with the norm before and the activation behind
    it; TB/s counts the weight's bytes alone. For a stated size (--device-memory) only the ways are shown.

    Examples:

      slipstream bench plans Qwen/Qwen3-8B --precision q4

      slipstream bench plans config.json --precision fp8 --rows 8 --rows 64 --device-memory 141GB
    """
    from service.models import ModelNotFound
    from worker.client import ModelError

    figures = device.figures()
    try:
        path = find_model(model)
        chosen = dataclasses.replace(options.engine_options(path), device=device.gpu or 0)
        if arms_only or device.device_memory is not None:
            found = _listed(path, chosen, figures, rows)
        else:
            found = _measured(path, chosen, figures, rows)
    except (ModelNotFound, ModelError) as error:
        fail(str(error))
    if as_json:
        typer.echo(json.dumps([_as_json(figure) for figure in found]))
    else:
        _print(found, figures)


def _listed(
    path: Path, options: EngineOptions, device: DeviceFigures, rows: list[int] | None
) -> list[ProductFigure]:
    from worker.client import list_products

    return list_products(path, options, device, rows)


def _measured(
    path: Path, options: EngineOptions, device: DeviceFigures, rows: list[int] | None
) -> list[ProductFigure]:
    from rich.console import Console
    from rich.progress import Progress

    from worker.client import measure_products

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("products", total=1.0)

        def hear(share: float) -> None:
            progress.update(task, completed=share)

        return list(measure_products(path, options, device, rows, hear))


def _as_json(figure: ProductFigure) -> dict[str, Any]:
    rates = {"terabytes_per_second": figure.terabytes_per_second, "teraflops": figure.teraflops}
    return dataclasses.asdict(figure) | rates


def _print(figures: Iterable[ProductFigure], device: DeviceFigures) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    table = Table(box=None, header_style="dim", pad_edge=False)
    for title in ("product", "n × k", "rows", "way", "µs", "TB/s", "TFLOP/s"):
        table.add_column(title, justify="left" if title in ("product", "way") else "right")
    by_product: dict[str, list[ProductFigure]] = {}
    for figure in figures:
        by_product.setdefault(figure.product, []).append(figure)
    for product, rows in by_product.items():
        for place, figure in enumerate(rows):
            shape = f"{figure.n} × {figure.k}"
            head = (product, shape) if place == 0 else ("", "")
            rates = (figure.microseconds, figure.terabytes_per_second, figure.teraflops)
            cells = ["–" if rate is None else f"{rate:,.2f}" for rate in rates]
            table.add_row(*head, f"{figure.rows:,}", figure.arm, *cells)
        table.add_section()
    console.print(f"on {device.name}", highlight=False)
    console.print(table)
