"""`slipstream generate` and `slipstream chat`: text from a running server, streamed to the terminal.

The answer goes to stdout, everything else to stderr, so that output can be piped.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.connection import Connection, fail, inference, reporting_failures
from service.cli.sampling import SamplingFlags

if TYPE_CHECKING:
    from protos.slipstream.v1.inference_pb2 import Chat, GenerateRequest
    from service.cli.streaming import Answer

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON object at the end instead of streaming text.")
]
TimeoutFlag = Annotated[
    float | None, typer.Option(help="Seconds until the server gives the request up.", min=0.001)
]
PromptArgument = Annotated[
    str, typer.Argument(help="Text to continue. - reads it from standard input.", show_default=False)
]
MessageArgument = Annotated[
    str | None,
    typer.Argument(help="One message. Left out: an interactive conversation.", show_default=False),
]
SystemFlag = Annotated[str | None, typer.Option("--system", help="Instructions ahead of the conversation.")]

_HELP_IN_CHAT = "/reset starts over, /system TEXT sets instructions, /quit leaves (or Ctrl-D)"


def generate(
    connection: Connection,
    sampling: SamplingFlags,
    prompt: PromptArgument,
    as_json: JsonFlag = False,
    timeout: TimeoutFlag = None,
) -> None:
    """Continue a text. Streams the answer to stdout and prints its speed to stderr.

    Example: slipstream generate "The capital of France is" --max-tokens 16

    The prompt goes to the model as it is; slipstream chat uses the model's chat template.
    """
    from protos.slipstream.v1.inference_pb2 import GenerateRequest

    text = sys.stdin.read() if prompt == "-" else prompt
    with reporting_failures(connection):
        _answer(connection, GenerateRequest(text=text, sampling=sampling.to_proto()), as_json, timeout)


def chat(
    connection: Connection,
    sampling: SamplingFlags,
    message: MessageArgument = None,
    system: SystemFlag = None,
    as_json: JsonFlag = False,
    timeout: TimeoutFlag = None,
) -> None:
    """Talk to the model. With a message: one answer; without: a conversation with history.

    Example: slipstream chat "Name three rivers." --temperature 0
    """
    if as_json and message is None:
        fail("--json needs a message")
    with reporting_failures(connection):
        conversation = Conversation(connection, sampling, system, timeout)
        if message is None:
            conversation.run()
        else:
            conversation.add("user", sys.stdin.read() if message == "-" else message)
            _answer(connection, conversation.request(), as_json, timeout)


class Conversation:
    """An interactive chat: the history so far, and the loop that extends it."""

    def __init__(
        self, connection: Connection, sampling: SamplingFlags, system: str | None, timeout: float | None
    ) -> None:
        from protos.slipstream.v1.inference_pb2 import Chat

        self._connection, self._sampling, self._timeout = connection, sampling, timeout
        self._chat: Chat = Chat()
        self._reset(system)

    def add(self, role: str, content: str) -> None:
        self._chat.messages.add(role=role, content=content)

    def request(self) -> GenerateRequest:
        from protos.slipstream.v1.inference_pb2 import GenerateRequest

        return GenerateRequest(chat=self._chat, sampling=self._sampling.to_proto())

    def run(self) -> None:
        """Reads messages until the end of input. Ctrl-C stops an answer; at the prompt, it leaves."""
        import readline  # noqa: F401  (gives input() line editing and history)

        typer.secho(_HELP_IN_CHAT, dim=True, err=True)
        while True:
            try:
                line = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                typer.echo(err=True)
                return
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._turn(line)

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/reset":
            self._reset(None)
        elif name == "/system" and rest:
            self._reset(rest)
        else:
            typer.secho(_HELP_IN_CHAT, dim=True, err=True)

    def _turn(self, line: str) -> None:
        import grpc

        from service.cli.connection import describe

        self.add("user", line)
        try:
            answer = _answer(self._connection, self.request(), False, self._timeout)
        except KeyboardInterrupt:
            typer.secho("\n(stopped)", dim=True, err=True)
        except grpc.RpcError as error:
            typer.secho(f"error: {describe(error, self._connection.target)}", fg="red", err=True)
        else:
            self.add("assistant", answer.text)
            return
        del self._chat.messages[-1]  # a turn without an answer is no part of the history

    def _reset(self, system: str | None) -> None:
        del self._chat.messages[:]
        if system:
            self.add("system", system)


def _answer(
    connection: Connection, request: GenerateRequest, as_json: bool, timeout_s: float | None
) -> Answer:
    """Runs one request and prints it. Raises grpc.RpcError."""
    from service.cli.streaming import stream_answer

    shown = False

    def show(text: str) -> None:
        nonlocal shown
        if not as_json:
            shown = True
            sys.stdout.write(text)
            sys.stdout.flush()

    try:
        with connection.open() as channel:
            answer = stream_answer(
                inference(channel),
                request,
                metadata=connection.metadata(),
                timeout_s=timeout_s,
                on_text=show,
            )
    except Exception:
        if shown:
            typer.echo()  # what went wrong is told on a line of its own
        raise
    if as_json:
        typer.echo(json.dumps(answer.as_json(), ensure_ascii=False))
    else:
        typer.echo()
        typer.secho(answer.summary(), dim=True, err=True)
    return answer
