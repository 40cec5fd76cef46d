"""`slipstream inspect`: what is understood of a model's files, without serving it."""

from __future__ import annotations

from typing import Annotated

import typer

from service.cli.connection import EXIT_FAILED, fail


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder, a .gguf file, a Hugging Face id or a demo model's name.", show_default=False
        ),
    ],
) -> None:
    """Print what is understood of a model: family, layers, parameters, memory, unknown tensors.

    Exit code 1 if it could not be served. Needs no server.

    Example: slipstream inspect smollm2-135m-instruct
    """
    from service.models import ModelNotFound, resolve_model
    from worker.client import ModelError, inspect_model

    try:
        report = inspect_model(resolve_model(model).path)
    except (ModelNotFound, ModelError) as error:
        fail(str(error))
    typer.echo(report.render(), nl=False)
    if not report.is_usable:
        raise typer.Exit(EXIT_FAILED)
