"""Times decode attention in one launch, over bf16 and e4m3 pages, for bench_kernels.py. Knows no engine."""

from __future__ import annotations

import numpy as np
from cuda.bindings import driver
from kernel_bench import WORKING_SET, Bench
from kernel_support import check

from kernels.attention_step import attention_step
from kernels.rope import HeadInput
from kernels.tensor import DType, Tensor

CASES = (
    (1, 384, 16, DType.BF16),
    (8, 384, 16, DType.BF16),
    (16, 384, 16, DType.BF16),
    (1, 384, 32, DType.BF16),
    (8, 384, 32, DType.BF16),
    (1, 8192, 16, DType.BF16),
    (1, 384, 16, DType.E4M3),
    (8, 384, 16, DType.E4M3),
    (64, 384, 16, DType.E4M3),
    (32, 4096, 32, DType.E4M3),
    (64, 4096, 16, DType.E4M3),
)
"""Rows, context, query heads, type of the pages."""
N_KV_HEADS, HEAD_DIM = 8, 128
_NO_NAN = 0xBE
"""Mask of random bytes: e4m3 of moderate size."""


def steps(bench: Bench) -> None:
    """A figure for each case."""
    for case in CASES:
        _step(bench, *case)


def _step(bench: Bench, rows: int, context: int, n_heads: int, kv: DType) -> None:
    gpu, each = bench.gpu, -(-context // 64)
    moved = 2 * rows * context * N_KV_HEADS * HEAD_DIM * kv.bytes
    table = bench.rng.permutation(rows * each).astype(np.int32).reshape(rows, each)
    angles = bench.rng.uniform(-3, 3, (each * 64, HEAD_DIM // 2)).astype(np.float32)
    shared = {
        "row_slot": gpu.upload(np.arange(rows, dtype=np.int32)),
        "slot_position": gpu.upload(np.full(rows, context - 1, np.int32)),
        "slot_active": gpu.upload(np.ones(rows, np.int32)),
        "block_table": gpu.upload(table),
    }
    cosines, sines, norm = gpu.upload(np.cos(angles)), gpu.upload(np.sin(angles)), bench.random(HEAD_DIM)
    calls = []
    for _ in range(max(2, min(28, -(-WORKING_SET // moved)))):
        raw = bench.random(rows, (n_heads + 2 * N_KV_HEADS) * HEAD_DIM)
        launch = attention_step(
            gpu.library,
            gpu.limits,
            heads=HeadInput(raw, cosines, sines, q_norm=norm, k_norm=norm),
            out=bench.random(rows, n_heads, HEAD_DIM),
            scale=HEAD_DIM**-0.5,
            **shared,
            **_pages(bench, rows * each, kv),
        )
        calls.append([launch])
    name = "attention_step" if kv is DType.BF16 else "attention_step, e4m3"
    bench.measure(name, f"{rows}×{context}, {n_heads}/{N_KV_HEADS} heads of {HEAD_DIM}", calls, moved)
    bench.release()


def _pages(bench: Bench, pages: int, kv: DType) -> dict[str, Tensor]:
    shape = (pages, N_KV_HEADS, 64, HEAD_DIM)
    if kv is DType.BF16:
        return {"k_pages": bench.random(*shape), "v_pages": bench.random(*shape)}
    noise = bench.gpu.upload(bench.rng.integers(0, 256, 1 << 22).astype(np.uint8) & _NO_NAN)
    found = {}
    for name in "kv":
        found[f"{name}_pages"] = tensor = bench.gpu.empty(shape, kv)
        for done in range(0, tensor.bytes, noise.bytes):
            size = min(noise.bytes, tensor.bytes - done)
            check(driver.cuMemcpyDtoDAsync(tensor.address + done, noise.address, size, bench.gpu.stream))
        exponents = bench.rng.integers(-7, -5, (pages, N_KV_HEADS))
        found[f"{name}_scales"] = bench.gpu.upload(np.exp2(exponents).astype(np.float32))
    return found
