"""`slipstream tokenize`: what the served model's tokenizer makes of a text."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from service.cli.connection import Connection, inference, reporting_failures


def tokenize(
    connection: Connection,
    text: Annotated[str, typer.Argument(help="Text. - reads it from standard input.", show_default=False)],
    as_chat: Annotated[
        bool, typer.Option("--chat", help="Take it as a user's message and show the rendered chat template.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Show a text's tokens and their ids.

    Example: slipstream tokenize "Hello, world"
    """
    from protos.slipstream.v1.inference_pb2 import Chat, Message, TokenizeRequest

    text = sys.stdin.read() if text == "-" else text
    request = TokenizeRequest(text=text)
    if as_chat:
        request = TokenizeRequest(chat=Chat(messages=[Message(role="user", content=text)]))
    with reporting_failures(connection), connection.open() as channel:
        answer = inference(channel).Tokenize(request, metadata=connection.metadata())
    if as_json:
        tokens = [token.decode("utf-8", "backslashreplace") for token in answer.tokens]
        typer.echo(json.dumps({"ids": list(answer.ids), "tokens": tokens, "text": answer.text}))
        return
    for token_id, token in zip(answer.ids, answer.tokens, strict=True):
        typer.echo(f"{token_id:>8}  {token.decode('utf-8', 'backslashreplace')!r}")
    typer.secho(f"{len(answer.ids)} tokens of at most {answer.max_sequence_length}", dim=True, err=True)
