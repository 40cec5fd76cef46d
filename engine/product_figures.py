"""Which way each matrix product of a model takes, and how fast it is: what `slipstream bench plans` shows.

Importing this imports no CUDA. Knows no command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelError
from engine.options import EngineOptions
from engine.plan_report import DeviceFigures, plan_engine_for, read_model

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Numbers of rows that are shown where none are named."""


@dataclass(frozen=True, slots=True)
class ProductFigure:
    """One product at one number of rows."""

    product: str
    """"q|k|v", "o", "gate|up", "down" or "head"."""
    n: int
    k: int
    rows: int
    arm: str
    """How it is computed: engine.cuda.products.Arm."""
    weight_bytes: int
    microseconds: float | None = None
    """The median, with the norm before and the activation behind it; None without a GPU."""

    @property
    def terabytes_per_second(self) -> float | None:
        """Of the weight alone."""
        return None if self.microseconds is None else self.weight_bytes / self.microseconds / 1e6

    @property
    def teraflops(self) -> float | None:
        """Per second."""
        flops = 2 * self.rows * self.n * self.k
        return None if self.microseconds is None else flops / self.microseconds / 1e6


def list_products(
    path: Path, options: EngineOptions, device: DeviceFigures, rows: Sequence[int] | None = None
) -> list[ProductFigure]:
    """Every product's arm at each number of rows that a step can have. Raises ModelError."""
    plan = plan_engine_for(path, options, device)
    from engine.cuda.product_bench import list_products as listed

    return listed(plan, _within(rows, plan.buffers.sizes.rows))


def measure_products(
    path: Path,
    options: EngineOptions,
    device: DeviceFigures,
    rows: Sequence[int] | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Iterator[ProductFigure]:
    """The same with times on GPU options.device, each as soon as it is known. Weights are random, of the
    model's shapes. Raises ModelError, EngineError.
    """
    plan = plan_engine_for(path, options, device)
    config, _ = read_model(path)
    from engine.cuda.product_bench import measure_products as measured

    yield from measured(
        config, options, plan.tier.precision, _within(rows, plan.buffers.sizes.rows), progress
    )


def _within(rows: Sequence[int] | None, most: int) -> list[int]:
    """Raises ModelError for a number asked for that no step of the engine has."""
    beyond = [count for count in rows or () if not 1 <= count <= most]
    if beyond:
        raise ModelError(f"No step has {beyond[0]} rows: with these options there are 1 … {most}.")
    return [count for count in rows or ROWS if count <= most]
