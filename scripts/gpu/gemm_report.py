"""What bench_gemm measures, and the table it makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BIGGEST = 8192
"""Rows, n and k of the product that sets the ceiling."""


@dataclass(frozen=True)
class Figure:
    """One product."""

    model: str
    layer: str
    key: str
    rows: int
    n: int
    k: int
    microseconds: float
    heuristic_microseconds: float
    gigabytes_per_second: float
    teraflops: float
    limit_microseconds: float
    algorithm: dict[str, int]

    @property
    def share(self) -> float:
        return self.limit_microseconds / self.microseconds


@dataclass
class Report:
    """Everything measured."""

    machine: dict[str, Any] = field(default_factory=dict)
    startup_seconds: dict[str, float] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)
    host_microseconds: dict[str, float] = field(default_factory=dict)
    products: list[Figure] = field(default_factory=list)
    epilogues: list[dict[str, Any]] = field(default_factory=list)
    reductions: list[dict[str, Any]] = field(default_factory=list)
    loading: list[dict[str, Any]] = field(default_factory=list)


def table(report: Report) -> str:
    """The report for people."""
    machine, ceilings = report.machine, report.ceilings
    lines = [
        "# Matrix products and weight loading",
        "",
        f"{machine['gpu']}, driver for CUDA {machine['driver_cuda']}, cuBLASLt {machine['cublaslt']}. "
        f"Measured beside: device copy {ceilings['copy_bytes_per_second'] / 1e12:.2f} TB/s, "
        f"{BIGGEST}³ product {ceilings['gemm_8192_flops_per_second'] / 1e12:.0f} TFLOP/s in bf16 and "
        f"{ceilings['fp8_gemm_8192_flops_per_second'] / 1e12:.0f} in e4m3. Weights from device memory, "
        "random bf16, but heads write float32, and layers of e4m3 leave raw sums in bf16.",
        "",
        "| model | layer | rows×n×k | µs | heuristic's first, µs | GB/s | TFLOP/s | limit, µs | share |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {f.model} | {f.layer} | {f.rows}×{f.n}×{f.k} | {f.microseconds:.2f} "
        f"| {f.heuristic_microseconds:.2f} | {f.gigabytes_per_second:.0f} | {f.teraflops:.1f} "
        f"| {f.limit_microseconds:.2f} | {f.share:.0%} |"
        for f in report.products
    ]
    names = list(report.epilogues[0]["us"]) if report.epilogues else []
    lines += ["", f"| epilogues, µs | rows | {' | '.join(names)} |", "| --- | --- |" + " --- |" * len(names)]
    for row in report.epilogues:
        times = " | ".join(f"{row['us'][name]:.2f}" for name in names)
        lines.append(f"| {row['model']} {row['layer']} | {row['rows']} | {times} |")
    lines += ["", "| split-K sums, rows×n×k | fixed order, µs | any, µs |", "| --- | --- | --- |"]
    for row in report.reductions:
        times = row["us"]
        lines.append(
            f"| {row['rows']}×{row['n']}×{row['k']} | {times['fixed order']:.2f} | {times['any']:.2f} |"
        )
    lines += ["", "| loading | threads | s | GB/s |", "| --- | --- | --- | --- |"]
    for row in report.loading:
        lines.append(
            f"| {row['model']}, {row['bytes'] / 1e9:.1f} GB from page cache | {row['threads']} "
            f"| {row['seconds']:.2f} | {row['gigabytes_per_second']:.1f} |"
        )
    for title, values, unit in (
        ("host cost", report.host_microseconds, "µs"),
        ("start", report.startup_seconds, "s"),
    ):
        lines += ["", f"| {title} | {unit} |", "| --- | --- |"]
        lines += [f"| {name} | {value} |" for name, value in values.items()]
    return "\n".join(lines) + "\n"
