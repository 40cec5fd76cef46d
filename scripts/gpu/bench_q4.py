"""Times products with q4_0 weights on the GPU present: every variant and cluster size, or the plans in use.

    PYTHONPATH=.:tests/gpu:scripts/gpu python scripts/gpu/bench_q4.py [--sweep [TEXT]] [--rows 64 16] [--wide]

Prints a line per shape, and what all products of a decode step of two models take together. With --wide also
what turning a weight into bf16 for cuBLASLt takes, against slabs of 64 rows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from kernel_bench import Bench
from kernel_support import Gpu, random_bf16

from engine.cuda.device import Device
from engine.cuda.gemm import WORKSPACE_BYTES, GemmKey, GemmPlanner
from kernels import q4, q4_gemm
from kernels.q4 import Q4Tiles, tile_shapes
from kernels.q4_gemm import VARIANTS, Q4GemmPlan, pick_plan
from kernels.skinny import Finish
from kernels.tensor import DType, Tensor

MODELS = {
    "Qwen3-1.7B": (
        28,
        {"qkv": (4096, 2048), "o": (2048, 2048), "gate_up": (12288, 2048), "down": (2048, 6144)},
    ),
    "Qwen3-8B": (
        36,
        {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
    ),
}
HEADS = {"Qwen3-1.7B": (151936, 2048), "Qwen3-8B": (151936, 4096)}
WIDE_ROWS = (65, 96, 128, 192, 256, 384, 512)
FINISH = {"o": Finish.ADD, "down": Finish.ADD, "gate_up": Finish.SWIGLU}


class Q4Bench(Bench):
    """Takes the bandwidth of a copy, and no rate of arithmetic, for its limit."""

    def __init__(self) -> None:
        self.gpu = Gpu((*q4.UNITS, *q4_gemm.UNITS))
        self.rng = np.random.default_rng(7)
        self.figures = []
        self.bandwidth = self.copy_bandwidth()
        self.flops = 0.8e15
        self.noise = self.gpu.upload(random_bf16(self.rng, 16 << 20))
        self.scale_noise = np.abs(self.rng.standard_normal(1 << 20)).astype(np.float16) / np.float16(64)

    def weight(self, n: int, k: int) -> Q4Tiles:
        """Random quants and scales."""
        quants, scales = tile_shapes(n, k).values()
        count = int(np.prod(scales[0]))
        noise = np.resize(self.scale_noise, count).reshape(scales[0])
        bits = self.random(int(np.prod(quants[0])) // 2)
        return Q4Tiles(Tensor(bits.address, *quants), self.gpu.upload(noise), n, k)

    def product(
        self, name: str, rows: int, n: int, k: int, plans: list[Q4GemmPlan]
    ) -> list[tuple[float, Q4GemmPlan]]:
        """Microseconds of one call by each plan, the fastest first. n: the weight's rows."""
        finish = FINISH.get(name, Finish.STORE)
        width = n // 2 if finish is Finish.SWIGLU else n
        out = DType.F32 if name == "head" else DType.BF16
        weights = [self.weight(n, k) for _ in range(self.copies(n * k * 9 // 16))]
        x, y = self.random(rows, k), self.gpu.empty((rows, width), out, fill=0)
        moved = weights[0].bytes + x.bytes + y.bytes
        found = []
        for plan in plans:
            calls = [
                [
                    q4_gemm.q4_gemm(
                        self.gpu.library, self.gpu.limits, x=x, weight=w, y=y, finish=finish, plan=plan
                    )
                ]
                for w in weights
            ]
            label = f"{rows}×{n}×{k} {plan.variant.expression} ×{plan.cluster}"
            found.append((self.measure(name, label, calls, moved).microseconds, plan))
        self.release()
        return sorted(found, key=lambda pair: pair[0])

    def dequantise(self, n: int, k: int) -> float:
        """Microseconds of q4_dequantise into one scratch buffer."""
        weights = [self.weight(n, k) for _ in range(self.copies(n * k * 9 // 16))]
        out = self.gpu.empty((n, k), DType.BF16)
        calls = [[q4.q4_dequantise(self.gpu.library, tiles=w, out=out)] for w in weights]
        figure = self.measure("q4_dequantise", f"{n}×{k}", calls, weights[0].bytes + out.bytes)
        self.release()
        return figure.microseconds

    def through_bf16(self, planner: GemmPlanner, rows: int, n: int, k: int) -> float:
        """Microseconds of q4_dequantise and cuBLASLt's product, by the heuristic's first choice."""
        weights = [self.weight(n, k) for _ in range(self.copies(n * k * 9 // 16))]
        scratch, workspace = self.gpu.empty((n, k), DType.BF16), self.gpu.empty((WORKSPACE_BYTES,), DType.U8)
        x, y = self.random(rows, k), self.gpu.empty((rows, n), DType.BF16)
        gemm = planner.plan(GemmKey(rows, n, k)).bind(x=x, w=scratch, y=y, workspace=workspace)
        calls: list[list[Any]] = [
            [q4.q4_dequantise(self.gpu.library, tiles=w, out=scratch), gemm] for w in weights
        ]
        figure = self.measure("through bf16", f"{rows}×{n}×{k}", calls, weights[0].bytes)
        self.release()
        return figure.microseconds

    def wide(self, model: str) -> None:
        """Both ways for each shape."""
        planner = GemmPlanner(Device.open(0), cache_folder=None)
        for name, (n, k) in MODELS[model][1].items():
            print(f"DEQUANTISE {model} {name}: {self.dequantise(n, k):.2f} µs", flush=True)
            pairs = []
            for rows in WIDE_ROWS:
                slabs = self.product(name, rows, n, k, plans_for(self, name, rows, n, k, None))[0][0]
                pairs.append(f"{rows}: {slabs:.1f} | {self.through_bf16(planner, rows, n, k):.1f}")
            print(f"WIDE {model} {name}, slabs | through bf16: {', '.join(pairs)}", flush=True)


def plans_for(bench: Q4Bench, name: str, rows: int, n: int, k: int, sweep: str | None) -> list[Q4GemmPlan]:
    finish = FINISH.get(name, Finish.STORE)
    width = n // 2 if finish is Finish.SWIGLU else n
    limits = bench.gpu.limits
    if sweep is None:
        return [pick_plan(limits, rows, width, k, finish)]
    columns = next(c for c in (16, 32, 64) if min(rows, 64) <= c)
    return [
        Q4GemmPlan(variant, cluster)
        for variant in VARIANTS
        if variant.columns == columns and sweep in variant.expression
        for cluster in (1, 2, 3, 4, 6, 8)
        if cluster == 1
        or cluster * -(-n // (16 * variant.warps)) <= 4 * limits.multiprocessors * variant.resident
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", nargs="?", const="", help="all variants, or those with this in their name")
    parser.add_argument("--rows", type=int, nargs="*", default=[64])
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    bench = Q4Bench()
    report: list[dict[str, Any]] = []
    for model in options.models:
        layers, shapes = MODELS[model]
        for rows in options.rows:
            step = 0.0
            for name, (n, k) in {**shapes, "head": HEADS[model]}.items():
                plans = plans_for(bench, name, rows, n, k, options.sweep)
                found = bench.product(name, rows, n, k, plans)
                step += found[0][0] * (1 if name == "head" else layers)
                report += [
                    {"model": model, "name": name, "rows": rows, "us": us, "plan": str(plan)}
                    for us, plan in found
                ]
                best = ", ".join(f"{us:.2f} {p.variant.expression[8:-1]} ×{p.cluster}" for us, p in found[:5])
                print(f"BEST {model} {name} {rows} rows: {best}", flush=True)
            print(f"STEP {model}, {rows} rows: {step:.0f} µs", flush=True)
        if options.wide:
            bench.wide(model)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
