"""The commands of whoever runs a server: status, metrics, health, profile, drain, abort."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.connection import EXIT_FAILED, Connection, control, inference, reporting_failures

if TYPE_CHECKING:
    from rich.table import Table

    from protos.slipstream.v1.control_pb2 import GetStatusResponse, ProfileResponse, WorkerStatus

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")]


def status(connection: Connection, as_json: JsonFlag = False) -> None:
    """Show what the server is doing: state, workers, queues, pages, memory.

    Answers while the model still loads, too.
    """
    from google.protobuf.json_format import MessageToJson

    from protos.slipstream.v1.control_pb2 import GetStatusRequest

    with reporting_failures(connection), connection.open() as channel:
        answer = control(channel).GetStatus(GetStatusRequest(), metadata=connection.metadata())
    if as_json:
        typer.echo(MessageToJson(answer, preserving_proto_field_name=True))
    else:
        _print_status(answer)


def metrics(connection: Connection, as_json: JsonFlag = False) -> None:
    """Print all metrics in the Prometheus text format, or as JSON."""
    from google.protobuf.json_format import MessageToJson

    from protos.slipstream.v1.control_pb2 import GetMetricsRequest

    with reporting_failures(connection), connection.open() as channel:
        answer = control(channel).GetMetrics(GetMetricsRequest(), metadata=connection.metadata())
    if as_json:
        answer.prometheus_text = ""
        typer.echo(MessageToJson(answer, preserving_proto_field_name=True))
    else:
        typer.echo(answer.prometheus_text, nl=False)


def health(
    connection: Connection,
    service: Annotated[
        str, typer.Option(help='"" is readiness; "liveness" is whether the process answers at all.')
    ] = "",
    wait: Annotated[
        float, typer.Option(help="Wait up to so many seconds until it serves.", min=0, metavar="SECONDS")
    ] = 0.0,
) -> None:
    """Ask whether the server is ready. Exit code 0 if it serves, 1 if not.

    Example, in a start-up script: slipstream health --wait 60
    """
    from service.cli.waiting import wait_until_serving

    with reporting_failures(connection):
        state = wait_until_serving(connection, service, wait)
    typer.echo(state)
    if state != "SERVING":
        raise typer.Exit(EXIT_FAILED)


def drain(
    connection: Connection,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds until running requests are cut off. Default: never.", min=0),
    ] = None,
) -> None:
    """Let the server finish its running requests, take no new ones, and then exit."""
    from protos.slipstream.v1.control_pb2 import DrainRequest

    request = DrainRequest()
    if timeout is not None:
        request.timeout.FromMilliseconds(round(timeout * 1e3))
    with reporting_failures(connection), connection.open() as channel:
        answer = control(channel).Drain(request, metadata=connection.metadata())
    requests = "request" if answer.remaining == 1 else "requests"
    typer.echo(f"draining: {answer.remaining} {requests} left on the process that answered")


def abort(
    connection: Connection,
    request_id: Annotated[str, typer.Argument(help="The request's id, as in logs.", show_default=False)],
) -> None:
    """End a request by its id, queued or running. An unknown id is no error."""
    from protos.slipstream.v1.inference_pb2 import AbortRequest

    with reporting_failures(connection), connection.open() as channel:
        answer = inference(channel).Abort(AbortRequest(request_id=request_id), metadata=connection.metadata())
    typer.echo("aborted" if answer.found else "no such request is queued or running")


def profile(
    connection: Connection,
    steps: Annotated[int, typer.Option(help="Steps to measure.", min=1, max=10_000)] = 32,
    worker: Annotated[int, typer.Option(help="Which worker.", min=0)] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the steps.", min=0.001)] = 30.0,
    as_json: JsonFlag = False,
) -> None:
    """Show where a worker's next steps spend their time, stage by stage.

    Steps only happen while requests run: start some first.
    """
    from google.protobuf.json_format import MessageToJson

    from protos.slipstream.v1.control_pb2 import ProfileRequest

    request = ProfileRequest(steps=steps, worker=worker)
    request.timeout.FromMilliseconds(round(timeout * 1e3))
    with reporting_failures(connection), connection.open() as channel:
        answer = control(channel).Profile(request, metadata=connection.metadata())
    if as_json:
        typer.echo(MessageToJson(answer, preserving_proto_field_name=True))
    else:
        _print_profile(answer)


def _print_profile(answer: ProfileResponse) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="dim", pad_edge=False, title_justify="left")
    for title in ("stage, µs", "mean", "median", "p99", "total"):
        table.add_column(title, justify="left" if title.startswith("stage") else "right")
    for stage in answer.stages:
        figures = (stage.mean, stage.median, stage.p99, stage.total)
        table.add_row(stage.stage, *(f"{value:,.1f}" for value in figures))
    console = Console()
    console.print(f"{answer.steps} steps", highlight=False)
    if answer.steps:
        console.print(table)
    else:
        typer.secho("nothing ran meanwhile; send requests while it measures", fg="yellow", err=True)


def _print_status(answer: GetStatusResponse) -> None:
    from rich.console import Console

    from protos.slipstream.v1.control_pb2 import ServerState

    # Piped output has no width to respect: a wrapped table is of no use to grep.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    state = ServerState.Name(answer.state).removeprefix("SERVER_STATE_")
    colour = {"SERVING": "green", "LOADING": "yellow", "DEGRADED": "yellow"}.get(state, "red")
    console.print(
        f"[bold {colour}]{state}[/]  slipstream {answer.version}, up {_duration(answer.uptime_seconds)}, "
        f"fronts: {answer.fronts}, open streams on front {answer.front}: {answer.open_streams}",
        highlight=False,
    )
    console.print(_worker_table(answer.workers))
    for worker in answer.workers:
        memory = "  ".join(
            f"{name} {_size(size)}" for name, size in sorted(worker.memory_plan.items()) if size
        )
        if memory:
            held = f"{worker.weight_dtype} weights, {worker.kv_dtype} KV"
            console.print(f"worker {worker.index} memory: {memory} ({held})", highlight=False)
        for fallback in worker.fallbacks:
            console.print(f"[yellow]worker {worker.index}: {fallback}[/]", highlight=False)
        if worker.last_error:
            console.print(f"[red]worker {worker.index}: {worker.last_error}[/]", highlight=False)


def _worker_table(workers: Iterable[WorkerStatus]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="dim", pad_edge=False)
    for title in (
        "worker",
        "state",
        "engine",
        "pid",
        "running",
        "waiting",
        "paused",
        "pages used",
        "steps",
        "restarts",
    ):
        table.add_column(title, justify="left" if title in ("state", "engine") else "right")
    for worker in workers:
        used = worker.pages - worker.pages_free - worker.pages_cached
        table.add_row(
            str(worker.index),
            _worker_state(worker),
            f"{worker.engine} on {worker.device}" if worker.engine else "–",
            str(worker.pid or "–"),
            f"{worker.running}/{worker.slots}",
            str(worker.waiting),
            str(worker.paused),
            f"{used}/{worker.pages}",
            str(worker.steps),
            str(worker.restarts),
        )
    return table


def _worker_state(worker: WorkerStatus) -> str:
    from protos.slipstream.v1.control_pb2 import WorkerState

    state: str = WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower()
    if worker.load_stage and state in ("loading", "restarting"):
        return f"{state}: {worker.load_stage} {worker.load_progress:.0%}"
    return state


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02}m" if hours else f"{minutes}m {rest:02}s" if minutes else f"{rest}s"


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
