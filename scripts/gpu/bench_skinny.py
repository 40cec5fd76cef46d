"""Times the matrix products of few rows on the GPU present: each shape alone, and a model's layers in a row.

    PYTHONPATH=.:tests/gpu:scripts/gpu python scripts/gpu/bench_skinny.py --rows 1 8

Layers are their four products with dependent launch, and the norms that several rows need; no attention.
The time of "layers" is that of one layer.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from math import prod

from kernel_bench import Bench

from kernels.fp8 import Fp8Rows
from kernels.launch import Launch
from kernels.norm import add_rms_norm
from kernels.q4 import Q4Tiles, tile_shapes
from kernels.skinny import Finish, FusedNorm, Weight, WeightKind, skinny_product
from kernels.tensor import DType, Tensor

BITS = {WeightKind.BF16: 16.0, WeightKind.FP8: 8.0, WeightKind.Q4: 4.5}


@dataclass(frozen=True)
class Model:
    """A shape of a model."""

    hidden: int
    q_dim: int
    qkv: int
    intermediate: int
    vocab: int

    def products(self) -> tuple[tuple[str, int, int, Finish], ...]:
        """Name, n, k and finish of a layer's products."""
        return (
            ("q|k|v", self.qkv, self.hidden, Finish.STORE),
            ("o", self.hidden, self.q_dim, Finish.ADD),
            ("gate|up", self.intermediate, self.hidden, Finish.SWIGLU),
            ("down", self.hidden, self.intermediate, Finish.ADD),
        )


MODELS = {
    "SmolLM2-135M": Model(576, 576, 960, 1536, 49152),
    "Qwen3-1.7B": Model(2048, 2048, 4096, 6144, 151936),
    "Llama-3.1-8B": Model(4096, 4096, 6144, 14336, 128256),
}


def weight_bytes(kind: WeightKind, n: int, k: int, finish: Finish) -> int:
    return int(n * k * (2 if finish is Finish.SWIGLU else 1) * BITS[kind] / 8)


class SkinnyBench(Bench):
    """Products of one kind of weight with x of so many rows."""

    def weight(self, kind: WeightKind, n: int, k: int) -> Weight:
        if kind is WeightKind.BF16:
            return self.random(n, k)
        if kind is WeightKind.FP8:
            return Fp8Rows(Tensor(self.random(n, k // 2).address, (n, k), DType.E4M3), self.random_f32(n))
        parts = {
            name: Tensor(self.random(prod(shape) * dtype.bytes // 2).address, shape, dtype)
            for name, (shape, dtype) in tile_shapes(n, k).items()
        }
        return Q4Tiles(**parts, n=n, k=k)

    def product(
        self, kind: WeightKind, x: Tensor, y: Tensor, finish: Finish, norm: FusedNorm | None
    ) -> Launch:
        n, k = y.shape[1] * (2 if finish is Finish.SWIGLU else 1), x.shape[1]
        weight = self.weight(kind, n, k)
        return skinny_product(
            self.gpu.library, self.gpu.limits, x=x, weight=weight, y=y, finish=finish, norm=norm
        )

    def alone(
        self, kind: WeightKind, rows: int, n: int, k: int, finish: Finish, out: DType, name: str
    ) -> None:
        moved = weight_bytes(kind, n, k, finish)
        norm = FusedNorm(self.random(k), 1e-6) if rows == 1 and out is DType.BF16 else None
        norm = None if finish is Finish.ADD else norm
        x, y = self.random(rows, k), self.gpu.empty((rows, n), out, fill=0)
        calls = [[self.product(kind, x, y, finish, norm)] for _ in range(max(2, self.copies(moved)))]
        self.measure(f"{kind.value} {name}", f"{rows}×{moved / 1e6:.1f} MB", calls, moved)
        self.release()

    def layers(self, kind: WeightKind, rows: int, name: str, model: Model) -> None:
        moved = sum(weight_bytes(kind, n, k, finish) for _, n, k, finish in model.products())
        wide = max(model.qkv, model.intermediate)
        residual, normed = self.random(rows, model.hidden), self.random(rows, model.hidden)
        gains, buffer = self.random(model.hidden), self.random(rows, wide)
        calls = []
        for _ in range(max(4, self.copies(moved))):
            call: list[Launch] = []
            for _, n, k, finish in model.products():
                fused = None
                if finish is Finish.ADD:
                    x, y = Tensor(buffer.address, (rows, k), DType.BF16), residual
                else:
                    x, y = residual, Tensor(buffer.address, (rows, n), DType.BF16)
                    fused = FusedNorm(gains, 1e-6) if rows == 1 else None
                    if fused is None:
                        x = normed
                        call.append(
                            add_rms_norm(
                                self.gpu.library, residual=residual, weight=gains, out=normed, epsilon=1e-6
                            )
                        )
                call.append(self.product(kind, x, y, finish, fused))
            calls.append(call)
        self.measure(f"{kind.value} layers", f"{rows}×{name}", calls, moved)
        self.release()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--kinds", nargs="*", default=[kind.value for kind in WeightKind])
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    options = parser.parse_args()
    bench = SkinnyBench()
    print(f"copy {bench.bandwidth / 1e12:.2f} TB/s\n| product | rows × weights | µs | ± | | limit | share |")
    print("| --- | --- | ---: | --- | ---: | ---: | ---: |")
    for name in options.models:
        model = MODELS[name]
        for kind in map(WeightKind, options.kinds):
            for rows in (rows for rows in options.rows if rows <= kind.max_rows):
                for product, n, k, finish in model.products():
                    bench.alone(kind, rows, n, k, finish, DType.BF16, product)
                bench.alone(kind, rows, model.vocab, model.hidden, Finish.STORE, DType.F32, "head")
                bench.layers(kind, rows, name, model)


if __name__ == "__main__":
    main()
