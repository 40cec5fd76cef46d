"""Times every kernel family on the GPU present against its limit, and ways to launch against each other.

Writes NAME.json and NAME.md into the folder given.

    PYTHONPATH=.:tests/gpu:scripts/gpu python scripts/gpu/bench_kernels.py --out benchmarks
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from bench_launches import launch_costs
from bench_step import steps
from cuda.bindings import driver
from kernel_bench import REPLAYS, WORKING_SET, Bench, row_of
from kernel_support import check

from kernels import activation, attention_decode, attention_prefill, embedding, norm, rope, sampling, slots
from kernels.compiler import nvrtc_version
from kernels.tensor import DType, Tensor

E4M3 = ml_dtypes.float8_e4m3fn


class KernelBench(Bench):
    """The cases of each family."""

    def norms(self) -> None:
        for rows, hidden in ((1, 2048), (64, 2048), (2048, 2048), (64, 4096), (2048, 4096)):
            moved = rows * hidden * (2 + 2 + 2 + 2)
            weight = self.random(hidden)
            calls = [
                [
                    norm.add_rms_norm(
                        self.gpu.library,
                        residual=self.random(rows, hidden),
                        delta=self.random(rows, hidden),
                        weight=weight,
                        out=self.random(rows, hidden),
                        epsilon=1e-6,
                    )
                ]
                for _ in range(self.copies(moved))
            ]
            self.measure("add_rms_norm", f"{rows}×{hidden}", calls, moved)
            self.release()

    def activations(self) -> None:
        for rows, inter in ((1, 6144), (64, 6144), (2048, 6144), (2048, 12288)):
            moved = rows * inter * 6
            calls = [
                [
                    activation.gated_activation(
                        self.gpu.library, gate_up=self.random(rows, 2 * inter), out=self.random(rows, inter)
                    )
                ]
                for _ in range(self.copies(moved))
            ]
            self.measure("swiglu", f"{rows}×{inter}", calls, moved)
            self.release()

    def embeddings(self) -> None:
        for rows in (1, 64, 2048):
            table, out = self.random(151936, 2048), self.gpu.empty((rows, 2048), DType.BF16)
            calls = [
                [
                    embedding.embed(
                        self.gpu.library,
                        table=table,
                        out=out,
                        tokens=self.gpu.upload(self.rng.integers(0, 151936, rows).astype(np.int32)),
                    )
                ]
                for _ in range(16)
            ]
            self.measure("embed", f"{rows}×2048", calls, rows * 2048 * 4)
            self.release()

    def ropes(self) -> None:
        for rows, n_heads in ((1, 16), (64, 16), (2048, 16), (2048, 32)):
            n_kv, dim, width = 8, 128, 64
            moved = rows * (n_heads + 2 * n_kv) * dim * 4
            table = self.gpu.upload(np.arange(width, dtype=np.int32)[None])
            position = self.gpu.upload(np.arange(rows, dtype=np.int32) % (width * 64))
            angles, row_slot = self.random_f32(width * 64, 64), self.gpu.empty((rows,), DType.I32, fill=0)
            weight = self.random(dim)
            calls = [
                [
                    rope.rope_and_write(
                        self.gpu.library,
                        heads=rope.HeadInput(
                            self.random(rows, (n_heads + 2 * n_kv) * dim),
                            cosines=angles,
                            sines=angles,
                            q_norm=weight,
                            k_norm=weight,
                        ),
                        row_slot=row_slot,
                        row_position=position,
                        block_table=table,
                        q_out=self.random(rows, n_heads, dim),
                        k_pages=self.random(width, n_kv, 64, dim),
                        v_pages=self.random(width, n_kv, 64, dim),
                    )
                ]
                for _ in range(min(16, self.copies(moved)))
            ]
            self.measure("rope_and_write", f"{rows} rows, {n_heads}/{n_kv} heads", calls, moved)
            self.release()

    def decode(self, rows: int, context: int, n_heads: int, n_kv: int, dim: int) -> None:
        pages_each = -(-context // 64)
        moved = rows * context * n_kv * dim * 4 + rows * n_heads * dim * 4
        layers = max(2, min(28, -(-WORKING_SET // moved)))
        pages = rows * pages_each
        table = self.gpu.upload(self.rng.permutation(pages).astype(np.int32).reshape(rows, pages_each))
        position = self.gpu.upload(np.full(rows, context - 1, np.int32))
        active, row_slot = (
            self.gpu.upload(np.ones(rows, np.int32)),
            self.gpu.upload(np.arange(rows, dtype=np.int32)),
        )
        splits = attention_decode.max_splits(self.gpu.limits, n_kv)
        shape = attention_decode.DecodeShape(rows, n_heads, n_kv, dim, splits)
        workspace = self.gpu.buffers(attention_decode.DecodeWorkspace, shape.workspace(), fill=0)
        work = self.gpu.buffers(attention_decode.DecodePlan, shape.plan(), fill=0)
        self.gpu.run(
            attention_decode.plan_decode(
                self.gpu.library,
                row_slot=row_slot,
                slot_position=position,
                slot_active=active,
                plan=work,
                splits=splits,
                min_pages=attention_decode.min_split_pages(n_heads // n_kv),
            )
        )
        out = self.random(rows, n_heads, dim)
        calls = [
            attention_decode.attention_decode(
                self.gpu.library,
                self.gpu.limits,
                query=self.random(rows, n_heads, dim),
                k_pages=self.random(pages, n_kv, 64, dim),
                v_pages=self.random(pages, n_kv, 64, dim),
                block_table=table,
                plan=work,
                workspace=workspace,
                out=out,
                splits=splits,
                scale=dim**-0.5,
            )
            for _ in range(layers)
        ]
        self.measure("attention_decode", f"{rows}×{context}, {n_heads}/{n_kv} heads of {dim}", calls, moved)
        self.release()

    def decodes(self) -> None:
        for rows, context in (
            (1, 256),
            (1, 384),
            (1, 2048),
            (1, 8192),
            (8, 384),
            (64, 256),
            (64, 384),
            (64, 2048),
            (64, 8192),
        ):
            self.decode(rows, context, 16, 8, 128)
        for rows, context in ((1, 384), (8, 384), (64, 384), (32, 4096)):
            self.decode(rows, context, 32, 8, 128)
        self.decode(32, 4096, 64, 8, 128)
        self.decode(64, 2048, 32, 8, 64)
        self.decode(64, 2048, 16, 8, 256)

    def prefill(
        self,
        lengths: list[int],
        n_heads: int,
        n_kv: int,
        dim: int,
        *,
        pages_type: DType = DType.BF16,
        variant: attention_prefill.PrefillVariant | None = None,
    ) -> None:
        rows, group = sum(lengths), n_heads // n_kv
        shape = variant or attention_prefill.pick_variant(self.gpu.limits, dim)
        tiles = attention_prefill.tile_list(range(len(lengths)), lengths, [0] * len(lengths), group, shape)
        each = -(-max(lengths) // 64)
        pages = each * len(lengths)
        table = self.rng.permutation(pages).astype(np.int32).reshape(len(lengths), each)
        k_pages, v_pages, scales = self.pages((pages, n_kv, 64, dim), pages_type)
        launch = attention_prefill.attention_prefill(
            self.gpu.library,
            self.gpu.limits,
            query=self.random(rows, n_heads, dim),
            k_pages=k_pages,
            v_pages=v_pages,
            block_table=self.gpu.upload(table),
            tiles=self.gpu.upload(tiles),
            n_tiles=self.gpu.upload(np.array([len(tiles)], np.int32)),
            out=self.random(rows, n_heads, dim),
            scale=dim**-0.5,
            variant=variant,
            **scales,
        )
        flops = sum(4 * n_heads * dim * n * (n + 1) // 2 for n in lengths)
        case = f"{len(lengths)}×{lengths[0]}, {n_heads}/{n_kv} heads of {dim}"
        case += ", e4m3 pages" if scales else ""
        self.measure("attention_prefill", case, [[launch]], 4 * rows * n_heads * dim, flops)
        self.release()

    def pages(self, shape: tuple[int, ...], pages_type: DType) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Noise as keys and values, and their scales if the type has any."""
        if pages_type is DType.BF16:
            return self.random(*shape), self.random(*shape), {}
        noise = [(self.rng.standard_normal(shape, np.float32) * 64).astype(E4M3) for _ in range(2)]
        scale = np.full(shape[:2], 2.0**-6, np.float32)
        k_pages, v_pages = (self.gpu.upload(array) for array in noise)
        return k_pages, v_pages, {name: self.gpu.upload(scale) for name in ("k_scales", "v_scales")}

    def prefills(self) -> None:
        self.prefill([2048], 16, 8, 128)
        self.prefill([2048], 32, 8, 128)
        self.prefill([2048] * 8, 16, 8, 128)
        self.prefill([2048] * 8, 32, 8, 128)
        self.prefill([4096], 32, 8, 128)
        self.prefill([16384], 32, 8, 128)
        self.prefill([4096], 32, 8, 64)
        self.prefill([4096], 16, 4, 256)
        self.prefill([4096], 32, 8, 128, pages_type=DType.E4M3)

    def samplings(self) -> None:
        vocab = 151936
        kinds = {
            "greedy": {"temperature": 0.0},
            "temperature": {},
            "top-p 0.95, top-k 50": {"top_p": 0.95, "top_k": 50},
            "top-p 0.95": {"top_p": 0.95},
            "penalties, top-p 0.9": {"top_p": 0.9, "presence_penalty": 0.5},
        }
        for rows in (1, 8, 64):
            for kind, settings in kinds.items():
                self.sampling(rows, vocab, kind, settings)

    def sampling(self, rows: int, vocab: int, kind: str, settings: dict[str, float]) -> None:
        gpu = self.gpu
        shape = slots.SlotShape(rows, vocab, max_bias=16)
        state = slots.SlotBuffers(
            shape, **{n: gpu.empty(s, t, fill=0) for n, (s, t) in shape.buffers().items()}
        )
        staged = slots.stage_starts([slots.SlotSetup(slot=s, seed=s, **settings) for s in range(rows)], shape)  # type: ignore[arg-type]
        raw = gpu.upload(staged.starts.view(np.uint8).reshape(rows, -1))
        nothing = gpu.upload(np.zeros(1, np.int32))
        gpu.run(
            slots.start_slots(
                gpu.library,
                starts=raw,
                count=rows,
                tokens=nothing,
                bias_ids=nothing,
                bias_values=gpu.upload(np.zeros(1, np.float32)),
                slots=state,
            )
        )
        scratch = gpu.buffers(sampling.SampleScratch, sampling.SampleShape(rows, vocab, vocab).scratch())
        row_slot = gpu.upload(np.arange(rows, dtype=np.int32))
        results = gpu.empty((rows,), DType.I32), gpu.empty((rows,), DType.I32)
        logits = self.rng.standard_normal((rows, vocab), np.float32) * 2.5  # peaks near 11, as a model's do
        calls = [
            sampling.sample(
                gpu.library,
                logits=gpu.upload(np.roll(logits, i, axis=1)),
                row_slot=row_slot,
                slots=state,
                scratch=scratch,
                tokens=results[0],
                statuses=results[1],
                first_token=True,
                all_greedy=kind == "greedy",
            )
            for i in range(min(8, self.copies(rows * vocab * 4)))
        ]
        self.measure("sample", f"{rows}×{vocab}, {kind}", calls, rows * vocab * 4)
        self.release()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    parser.add_argument("--name", default="kernels-h200")
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    bench = KernelBench()
    launches: dict[str, float] = {}
    parts: dict[str, Callable[[], object]] = {
        "launches": lambda: launches.update(launch_costs(bench)),
        "norms": bench.norms,
        "activations": bench.activations,
        "embeddings": bench.embeddings,
        "ropes": bench.ropes,
        "decodes": bench.decodes,
        "steps": lambda: steps(bench),
        "prefills": bench.prefills,
        "samplings": bench.samplings,
    }
    print(f"copy {bench.bandwidth / 1e12:.2f} TB/s, bf16 GEMM {bench.flops / 1e12:.0f} TFLOP/s", flush=True)
    for name, part in parts.items():
        if not options.only or name in options.only:
            part()
    write(options, bench, launches)


def write(options: argparse.Namespace, bench: Bench, launches: dict[str, float]) -> None:
    name = check(driver.cuDeviceGetName(80, 0)).split(b"\0")[0].decode()
    environment = {
        "device": name,
        "driver": check(driver.cuDriverGetVersion()),
        "nvrtc": ".".join(map(str, nvrtc_version())),
        "copy_bytes_per_second": bench.bandwidth,
        "gemm_flops_per_second": bench.flops,
        "launch_microseconds": launches,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    figures = [dataclasses.asdict(figure) for figure in bench.figures]
    path = options.out / f"{options.name}.json"
    path.write_text(
        json.dumps({"environment": environment, "figures": figures}, indent=1, ensure_ascii=False)
    )
    ceilings = f"Copy {bench.bandwidth / 1e12:.2f} TB/s, bf16 GEMM {bench.flops / 1e12:.0f} TFLOP/s"
    lines = [
        f"# Kernels on one {name}",
        "",
        f"{ceilings} in the same run; "
        f"NVRTC {environment['nvrtc']}. Each kernel in a CUDA graph over buffers larger than L2, median of "
        f"{REPLAYS} replays; made by `scripts/gpu/bench_kernels.py`.",
        "",
        "| kernel | case | µs | spread | rate | limit µs | of limit |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        *(row_of(figure, bench) for figure in bench.figures),
        "",
        "Host microseconds per launch: " + "; ".join(f"{k} {v:.2f}" for k, v in launches.items()) + ".",
    ]
    (options.out / f"{options.name}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
