"""`slipstream plan`: what a model would take of a GPU's memory, and what would fit beside it."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.connection import fail
from service.cli.flags import Flag, names_of
from service.options import KvDtypeChoice, PrecisionChoice

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from worker.client import DeviceFigures, EngineOptions, Outlook, PlanReport

_UNITS = {"": 1} | {unit: 1000**power for power, unit in enumerate("KMGT", 1)}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("KMGT", 1)}
_SIZE = re.compile(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([KMGT]i?|)B?", re.IGNORECASE)
_LEAST_MEMORY, _MOST_MEMORY = 2**20, 2**50
"""Bytes of a GPU. Outside these a size is a slip: 141 for 141GB, or a zero too many."""
_PIPE_WIDTH = 200
"""Columns where no terminal says how wide it is."""
_GROUP = "As for serve"


@dataclass(frozen=True, slots=True)
class PlannedOptions:
    """Flags of `serve` that decide about memory."""

    precision: Annotated[PrecisionChoice, Flag("Of the weights.", _GROUP)] = "auto"
    kv_dtype: Annotated[KvDtypeChoice, Flag("Of keys and values.", _GROUP)] = "auto"
    max_sequences: Annotated[
        int | None,
        Flag("Requests that run at once. Default: 64.", _GROUP, names=names_of("max_sequences")),
    ] = None
    max_sequence_length: Annotated[
        int | None,
        Flag(
            "Most tokens of prompt and answer. Default: the model's own limit, as far as memory allows.",
            _GROUP,
            names=names_of("max_sequence_length"),
        ),
    ] = None
    max_step_tokens: Annotated[int | None, Flag("Most tokens in one step. Default: 8192.", _GROUP)] = None
    kv_pages: Annotated[int | None, Flag("Pages of 64 tokens. Default: what memory allows.", _GROUP)] = None
    memory_fraction: Annotated[
        float,
        Flag("Share of the device's memory to use.", _GROUP, names=names_of("memory_fraction")),
    ] = 0.9

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_sequence_length", "max_step_tokens", "kv_pages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                fail(f"--{name.replace('_', '-')} must be at least 1", 2)
        if not 0 < self.memory_fraction <= 1:
            fail("--memory-fraction must be above 0 and at most 1", 2)

    def engine_options(self, path: Path) -> EngineOptions:
        """As the server would pass them on."""
        from worker.client import EngineOptions, KvDtype, Precision

        values = dataclasses.asdict(self)
        values |= {"precision": Precision(self.precision), "kv_dtype": KvDtype(self.kv_dtype)}
        return EngineOptions(path, "cuda", **values)


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """Flags that say for which GPU."""

    gpu: Annotated[
        int | None, Flag("This GPU of this machine, as it is now. Default: the first.", "Device")
    ] = None
    device_memory: Annotated[
        str | None,
        Flag("A GPU of this size, such as 141GB or 80GiB, which need not be here.", "Device", metavar="SIZE"),
    ] = None

    def figures(self) -> DeviceFigures:
        """Ends the command if there is no such GPU."""
        from worker.client import ModelError, gpu_figures, stated_figures

        if self.gpu is not None and self.device_memory is not None:
            fail("--gpu and --device-memory exclude one another: plan for what is here, or for a size", 2)
        try:
            if self.device_memory is not None:
                return stated_figures(parse_size(self.device_memory))
            return gpu_figures(self.gpu or 0)
        except ModelError as error:
            advice = "" if self.device_memory else ". Without a GPU, state a size: --device-memory 141GB"
            fail(f"{str(error).rstrip('.')}{advice}")


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder, a .gguf file, a config.json alone, a Hugging Face id or a demo model's name.",
            show_default=False,
        ),
    ],
    options: PlannedOptions,
    device: PlannedDevice,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Print what serving a model would take of a GPU's memory, part by part, and what fits beside it.

    The server allocates exactly this, once, when it starts. The last table shows every precision of weights
    and KV side by side, with the same options. Exit code 1, and what to lower, if the model does not fit.
    Reads no weights; a config.json alone will do. Needs no GPU if a size is stated,
    but the Python parts for CUDA: pip install '.[cuda]'.

    Examples:

      slipstream plan Qwen/Qwen3-8B --device-memory 141GB

      slipstream plan model.gguf --precision q4 --kv-dtype fp8 --max-seqs 256 --max-len 8192

      slipstream plan ./checkpoint --gpu 0 --gpu-memory 0.5 --json
    """
    from service.models import ModelNotFound
    from worker.client import ModelError, plan_model

    figures = device.figures()
    try:
        path = find_model(model)
        report = plan_model(path, options.engine_options(path), figures)
    except ModelNotFound as error:
        fail(str(error))
    except ModelError as error:
        fail(f"{error}{_what_fits(path, options, figures)}")
    if as_json:
        typer.echo(json.dumps(_as_json(report)))
    else:
        _print(report)


def _what_fits(path: Path, options: PlannedOptions, figures: DeviceFigures) -> str:
    """Precisions in which the same model would fit, as a sentence; nothing if none does."""
    from worker.client import ModelError, plan_outlooks

    try:
        outlooks = plan_outlooks(path, options.engine_options(path), figures)
    except ModelError:  # the one that is being told already
        return ""
    fitting = [one for one in outlooks if one.refusal is None]
    choices = "; ".join(
        f"--precision {one.precision} --kv-dtype {one.kv_dtype} ({one.kv_tokens:,} tokens of KV)"
        for one in fitting
    )
    return f" It would fit with {choices}." if choices else ""


def parse_size(text: str) -> int:
    """Bytes of "141GB", "80GiB", "24e9". Ends the command for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        fail(f"--device-memory {text!r} is no size; write it as 141GB, 80GiB or a number of bytes", 2)
    unit = match[2][:1].upper() + match[2][1:].lower()
    size = float(match[1]) * _UNITS[unit]
    if not _LEAST_MEMORY <= size <= _MOST_MEMORY:
        fail(
            f"--device-memory {text!r} is {size:,.0f} bytes, which no GPU has; write it as 141GB or 80GiB", 2
        )
    return int(size)


def find_model(model: str) -> Path:
    """Raises ModelNotFound. A config.json alone is no model to serve, but enough to plan for one."""
    from service.models import resolve_model

    path = Path(model)
    return path if path.suffix == ".json" and path.is_file() else resolve_model(model).path


def _as_json(report: PlanReport) -> dict[str, Any]:
    figures = dataclasses.asdict(report)
    figures["path"] = str(report.path)
    return figures | {"kv_tokens": report.kv_tokens, "planned_bytes": report.planned_bytes}


def _print(report: PlanReport) -> None:
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    held = f"{report.precision} weights and {report.kv_dtype} KV"
    console.print(f"[bold]{report.architecture}[/], {held}, on {report.device}", highlight=False)
    console.print(
        f"{_size(report.total_bytes)} of memory, of which {report.memory_fraction:.0%} less "
        f"{_size(report.held_bytes)} held by others and by CUDA: {_size(report.budget_bytes)} to use\n",
        highlight=False,
    )
    console.print(_parts(report))
    console.print(
        f"\nThe KV cache holds [bold]{report.kv_tokens:,} tokens[/] in {report.kv_pages:,} pages, "
        f"{report.kv_bytes_per_token:,} bytes a token; {report.max_sequences} sequences at once, the longest "
        f"of {report.max_sequence_length:,} tokens.",
        highlight=False,
    )
    for note in report.notes:
        console.print(f"[yellow]{note}[/]", highlight=False)
    console.print("\nWith the same options in every precision (→ this plan):", highlight=False)
    console.print(_outlooks(report))
    _print_refusals(console, report.outlooks)


def _parts(report: PlanReport) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("part")
    table.add_column("size", justify="right")
    table.add_column("share", justify="right")
    table.add_column("", style="dim")
    for part in report.parts:
        table.add_row(part.name, _size(part.bytes), f"{part.bytes / report.budget_bytes:.1%}", part.about)
    share = f"{report.planned_bytes / report.budget_bytes:.1%}"
    table.add_row("[bold]in all[/]", f"[bold]{_size(report.planned_bytes)}[/]", share)
    return table


def _outlooks(report: PlanReport) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="dim", pad_edge=False)
    usual = min(4096, report.model_length)
    for title in (
        "", "weights", "KV", "weights take", "KV tokens", f"sequences of {usual:,}",
        f"sequences of {report.model_length:,}", "longest sequence",
    ):  # fmt: skip
        table.add_column(title, justify="left" if title in ("", "weights", "KV") else "right")
    for outlook in report.outlooks:
        is_chosen = (outlook.precision, outlook.kv_dtype) == (report.precision, report.kv_dtype)
        cells = ["→" if is_chosen else "", str(outlook.precision), str(outlook.kv_dtype)]
        if outlook.refusal is None:
            cells.append(_size(outlook.weights_bytes))
            figures = outlook.kv_tokens, outlook.batch_usual, outlook.batch_full, outlook.longest
            cells += [f"{figure:,}" for figure in figures]
        else:
            cells.append("cannot")
        table.add_row(*cells, style="bold" if is_chosen else None)
    return table


def _print_refusals(console: Console, outlooks: Iterable[Outlook]) -> None:
    refusals: dict[str, list[str]] = {}
    for outlook in outlooks:
        if outlook.refusal is not None:
            refusals.setdefault(outlook.refusal, []).append(f"{outlook.precision}/{outlook.kv_dtype}")
    for reason, choices in refusals.items():
        console.print(f"[dim]{', '.join(choices)}: {reason}[/]", highlight=False)


def _size(n_bytes: int) -> str:
    """Decimal, as GPUs' sizes are told."""
    return f"{n_bytes / 1e9:,.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.1f} MB"
