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
    """Print what is understood of a model: family, layers, parameters, memory, unknown tensors, tokenizer.

    Exit code 1 if it could not be served. Needs no server.

    Example: slipstream inspect smollm2-135m-instruct
    """
    from service.models import ModelNotFound, resolve_model
    from service.text import TextError, load_tokenizer
    from worker.client import ModelError, inspect_model

    try:
        path = resolve_model(model).path
        report = inspect_model(path)
        typer.echo(report.render(), nl=False)
        tokenizer = load_tokenizer(path)
    except (ModelNotFound, ModelError, TextError) as error:
        fail(str(error))
    typer.echo(f"  {'tokenizer':<14} {tokenizer.name}, {tokenizer.vocab_size:,} tokens")
    typer.echo(f"  {'stop tokens':<14} {', '.join(map(str, tokenizer.eos_token_ids)) or 'none'}")
    if not report.is_usable:
        raise typer.Exit(EXIT_FAILED)
