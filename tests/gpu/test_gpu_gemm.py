"""Matrix products by cuBLASLt against float64: real layers' shapes, awkward rows, epilogues, captures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuda.bindings import driver
from cuda_support import Memory, needs_gpu, opened_device
from kernel_support import assert_close

from engine.cuda.device import CudaError, Device, check
from engine.cuda.gemm import WORKSPACE_BYTES, Epilogue, Gemm, GemmKey, GemmPlanner
from engine.cuda.gemm_key import fits_fp8
from engine.quantization.fp8 import quantise_rows
from kernels.tensor import DType, Tensor

pytestmark = needs_gpu
ROOT = Path(__file__).resolve().parents[2]
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
ROWS = (1, 2, 3, 7, 8, 16, 17, 31, 33, 64, 65, 200, 256, 2048)
SHAPES = {
    "qwen3-1.7b qkv": (4096, 2048),
    "qwen3-1.7b o": (2048, 2048),
    "qwen3-1.7b gate_up": (12288, 2048),
    "qwen3-1.7b down": (2048, 6144),
    "qwen3-8b qkv": (6144, 4096),
    "qwen3-8b o": (4096, 4096),
    "qwen3-8b gate_up": (24576, 4096),
    "qwen3-8b down": (4096, 12288),
    "smollm2 qkv": (960, 576),
    "awkward": (104, 72),
}
FP8_ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 65, 200, 256, 2000)
FP8_ERRORS = {False: (2**-9, 4e-4), True: (2**-4, 6e-3)}
"""The largest and the mean error of a raw sum before it is rounded to bf16, in terms of the root of its
squared terms' sum: with float32 sums, and with fast accumulation."""
HEADS = {"qwen3-1.7b head": (151936, 2048), "qwen3-8b head": (151936, 4096)}
COLUMNS = 96
"""Of the output are computed in float64 too; all of it is checked for being written."""


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with opened_device() as device:
        yield device


@pytest.fixture(scope="module")
def planner(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GemmPlanner]:
    planner = GemmPlanner(device, cache_folder=tmp_path_factory.mktemp("gemm"))
    yield planner
    planner.close()


@pytest.fixture
def memory(device: Device) -> Iterator[Memory]:
    memory = Memory(device)
    yield memory
    memory.release()


def noise(rng: np.random.Generator, *shape: int, spread: float = 1.0) -> np.ndarray:
    """Normal numbers in bf16; large ones repeat themselves, but not row by row."""
    count = int(np.prod(shape))
    values = rng.standard_normal(min(count, 4_194_301), np.float32) * np.float32(spread)
    return np.resize(values.astype(BF16), count).reshape(shape)


def run(device: Device, gemm: Gemm) -> None:
    stream = device.stream()
    gemm(stream.handle)
    stream.synchronize()
    stream.close()


def workspace(memory: Memory) -> Tensor:
    return memory.empty((WORKSPACE_BYTES,), DType.U8)


def tolerance(k: int, y: DType) -> dict[str, Any]:
    """Half a bf16 step and more for the output; for the sums, float32's error over k terms of size 0.02,
    which tensor cores cut off instead of rounding.
    """
    return {"rtol": 2**-8 if y is DType.BF16 else 1e-5, "atol": 5e-7 * 0.02 * k}


@pytest.mark.parametrize("name", [*SHAPES, *HEADS])
def test_products_of_real_layers(
    planner: GemmPlanner, memory: Memory, rng: np.random.Generator, name: str
) -> None:
    """Every number of rows, tuned ones (powers of two) and the heuristic's choice for the others."""
    n, k = (SHAPES | HEADS)[name]
    y_type = DType.F32 if name in HEADS else DType.BF16
    rows_tested = [rows for rows in ROWS if name not in HEADS or rows <= 256]
    keys = {rows: GemmKey(rows, n, k, y=y_type) for rows in rows_tested}
    planner.plan_all(key for rows, key in keys.items() if rows & (rows - 1) == 0)
    host_x, host_w = noise(rng, rows_tested[-1], k), noise(rng, n, k, spread=0.02)
    x, w, scratch = memory.upload(host_x), memory.upload(host_w), workspace(memory)
    columns = np.unique(np.concatenate([[0, n - 1], rng.integers(0, n, COLUMNS)]))
    want = host_x.astype(np.float64) @ host_w[columns].astype(np.float64).T
    y_all = memory.empty((rows_tested[-1], n), y_type)
    for rows, key in keys.items():
        memory.poison(y_all)
        y = y_all.rows(0, rows)
        run(planner.device, planner.plan(key).bind(x=x.rows(0, rows), w=w, y=y, workspace=scratch))
        got = memory.download(y_all.rows(0, min(rows + 1, rows_tested[-1])))
        assert np.isfinite(got[:rows].astype(np.float32)).all(), key
        assert np.isnan(got[rows:].astype(np.float32)).all(), f"{key} wrote beyond its rows"
        assert_close(str(key), got[:rows, columns], want[:rows], **tolerance(k, y_type))


@pytest.mark.parametrize("y_type", [DType.BF16, DType.F32])
@pytest.mark.parametrize("rows", [1, 5, 64, 300])
@pytest.mark.parametrize(("n", "k"), [(2048, 6144), (104, 72)])
def test_adding_to_the_residual_in_place(
    planner: GemmPlanner, memory: Memory, rng: np.random.Generator, rows: int, n: int, k: int, y_type: DType
) -> None:
    key = GemmKey(rows, n, k, y=y_type, epilogue=Epilogue.ADD)
    planner.plan_all([key])
    host_x, host_w = noise(rng, rows, k), noise(rng, n, k, spread=0.02)
    host_c = noise(rng, rows, n).astype(BF16 if y_type is DType.BF16 else np.float32)
    residual = memory.upload(host_c)
    gemm = planner.plan(key).bind(
        x=memory.upload(host_x), w=memory.upload(host_w), y=residual, c=residual, workspace=workspace(memory)
    )
    run(planner.device, gemm)
    product = host_x.astype(np.float64) @ host_w.astype(np.float64).T
    limits = tolerance(k, y_type)
    if y_type is DType.BF16:  # the product may be rounded to bf16 by itself
        limits["atol"] += 2**-8 * np.abs(product)
    assert_close(str(key), memory.download(residual), product + host_c.astype(np.float64), **limits)


@pytest.mark.parametrize("rows", [1, 5, 64, 300])
@pytest.mark.parametrize(("n", "k"), [(4608, 3584), (104, 72)])
def test_biases_of_different_layers(
    planner: GemmPlanner, memory: Memory, rng: np.random.Generator, rows: int, n: int, k: int
) -> None:
    """Products that share a plan keep their own bias."""
    key = GemmKey(rows, n, k, epilogue=Epilogue.BIAS)
    planner.plan_all([key])
    host_x, host_w = noise(rng, rows, k), noise(rng, n, k, spread=0.02)
    x, w, scratch = memory.upload(host_x), memory.upload(host_w), workspace(memory)
    biases = [noise(rng, n, spread=3.0) for _ in range(2)]
    outputs = [memory.empty((rows, n), DType.BF16) for _ in biases]
    gemms = [
        planner.plan(key).bind(x=x, w=w, y=y, bias=memory.upload(bias), workspace=scratch)
        for bias, y in zip(biases, outputs, strict=True)
    ]
    for gemm in gemms:
        run(planner.device, gemm)
    product = host_x.astype(np.float64) @ host_w.astype(np.float64).T
    for bias, y in zip(biases, outputs, strict=True):
        assert_close(str(key), memory.download(y), product + bias.astype(np.float64), **tolerance(k, key.y))


@pytest.mark.parametrize(("n", "k"), [(2048, 2048), (4096, 12288)])
@pytest.mark.parametrize("rows", [1, 8, 64, 256])
def test_a_rows_result_depends_on_that_row_alone(
    planner: GemmPlanner, memory: Memory, rng: np.random.Generator, rows: int, n: int, k: int
) -> None:
    """To the bit: run after run, wherever the row stands, whatever stands beside it."""
    key = GemmKey(rows, n, k)
    planner.plan_all([key])
    host_x = noise(rng, rows, k)
    order = rng.permutation(rows)
    w, scratch = memory.upload(noise(rng, n, k, spread=0.02)), workspace(memory)
    y = memory.empty((rows, n), DType.BF16)

    def product(values: np.ndarray) -> np.ndarray:
        memory.poison(y)
        run(planner.device, planner.plan(key).bind(x=memory.upload(values), w=w, y=y, workspace=scratch))
        return memory.download(y).view(np.uint16)

    once = product(host_x)
    for _ in range(5):
        np.testing.assert_array_equal(product(host_x), once)
    np.testing.assert_array_equal(product(host_x[order]), once[order])
    others = noise(rng, rows, k)
    others[0] = host_x[0]
    np.testing.assert_array_equal(product(others)[0], once[0])


def test_a_plan_from_the_cache_is_captured_by_a_fresh_process(device: Device, tmp_path: Path) -> None:
    """No eager call comes first: the library loads its kernel while the stream is being captured."""
    keys = [GemmKey(rows, n, k) for rows in (1, 8, 64, 512) for n, k in ((4096, 2048), (2048, 6144))]
    planner = GemmPlanner(device, cache_folder=tmp_path)
    assert planner.plan_all(keys) == len(keys)
    assert planner.plan_all(keys) == 0
    planner.close()
    again = GemmPlanner(device, cache_folder=tmp_path)
    assert again.plan_all(keys) == 0
    assert all(again.plan(key).is_tuned for key in keys)
    again.close()
    done = subprocess.run(  # noqa: PLW1510
        [sys.executable, str(Path(__file__).with_name("capture_cold.py")), str(tmp_path)], cwd=ROOT,
        capture_output=True, text=True, timeout=120, input=json.dumps([(k.rows, k.n, k.k) for k in keys]),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True] * len(keys)


def test_a_graph_replays_with_new_inputs(
    planner: GemmPlanner, memory: Memory, rng: np.random.Generator
) -> None:
    """Two products that share one workspace, in one graph, the second reading the first's result."""
    first_key, second_key = GemmKey(16, 4096, 2048), GemmKey(16, 2048, 4096)
    planner.plan_all([first_key, second_key])
    host_w = [noise(rng, 4096, 2048, spread=0.02), noise(rng, 2048, 4096, spread=0.02)]
    x, middle, y = (memory.empty((16, width), DType.BF16) for width in (2048, 4096, 2048))
    scratch = workspace(memory)
    gemms = [
        planner.plan(first_key).bind(x=x, w=memory.upload(host_w[0]), y=middle, workspace=scratch),
        planner.plan(second_key).bind(x=middle, w=memory.upload(host_w[1]), y=y, workspace=scratch),
    ]
    stream = planner.device.stream()
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    check(driver.cuStreamBeginCapture(stream.handle, mode), "capture")
    for gemm in gemms:
        gemm(stream.handle)
    graph = check(driver.cuStreamEndCapture(stream.handle), "capture")
    executable = check(driver.cuGraphInstantiate(graph, 0), "instantiate")
    for _ in range(3):
        host_x = noise(rng, 16, 2048)
        check(driver.cuMemcpyHtoD(x.address, host_x.ctypes.data, x.bytes), "upload")
        memory.poison(y)
        check(driver.cuGraphLaunch(executable, stream.handle), "launch")
        stream.synchronize()
        inner = (host_x.astype(np.float64) @ host_w[0].astype(np.float64).T).astype(BF16).astype(np.float64)
        want = inner @ host_w[1].astype(np.float64).T
        assert_close("both products", memory.download(y), want, rtol=2**-7, atol=2e-2)
    check(driver.cuGraphExecDestroy(executable), "destroy")
    check(driver.cuGraphDestroy(graph), "destroy")
    stream.close()


def test_buffers_that_do_not_fit_are_refused(planner: GemmPlanner, memory: Memory) -> None:
    plan = planner.plan(GemmKey(4, 64, 32))
    x, w, y = (memory.empty(shape, DType.BF16) for shape in ((4, 32), (64, 32), (4, 64)))
    scratch = workspace(memory)
    with pytest.raises(ValueError, match=r"w must be bf16 \[64, 32\], got bf16 \[4, 32\]"):
        plan.bind(x=x, w=x, y=y, workspace=scratch)
    with pytest.raises(ValueError, match="c goes with the epilogue add"):
        plan.bind(x=x, w=w, y=y, c=y, workspace=scratch)
    with pytest.raises(ValueError, match="a bias goes with"):
        plan.bind(x=x, w=w, y=y, bias=y, workspace=scratch)
    with pytest.raises(ValueError, match="x is not aligned"):
        plan.bind(x=Tensor(x.address + 2, (4, 32), DType.BF16), w=w, y=y, workspace=scratch)
    with pytest.raises(ValueError, match="4×64×32 i32·bf16→bf16 none: no matrix products of i32"):
        planner.plan(GemmKey(4, 64, 32, x=DType.I32))


@pytest.mark.parametrize("name", [*SHAPES])
def test_raw_sums_of_e4m3(planner: GemmPlanner, memory: Memory, rng: np.random.Generator, name: str) -> None:
    """As quantised rows are: normal, the largest magnitude of a row 448."""
    n, k = SHAPES[name]
    if not fits_fp8(n, k):
        n, k = 112, 80
    keys = {rows: GemmKey(rows, n, k, x=DType.E4M3, w=DType.E4M3) for rows in FP8_ROWS}
    planner.plan_all(key for rows, key in keys.items() if rows & (rows - 1) == 0)
    host_x, host_w = (
        quantise_rows(rng.standard_normal((rows, k), np.float32)).data.view(E4M3)
        for rows in (FP8_ROWS[-1], n)
    )
    x, w, scratch = memory.upload(host_x), memory.upload(host_w), workspace(memory)
    columns = np.unique(np.concatenate([[0, n - 1], rng.integers(0, n, COLUMNS)]))
    host_x, host_w = host_x.astype(np.float64), host_w[columns].astype(np.float64)
    want, size = host_x @ host_w.T, np.sqrt((host_x**2) @ (host_w**2).T)
    y_all = memory.empty((FP8_ROWS[-1], n), DType.BF16)
    for rows, key in keys.items():
        memory.poison(y_all)
        y = y_all.rows(0, rows)
        run(planner.device, planner.plan(key).bind(x=x.rows(0, rows), w=w, y=y, workspace=scratch))
        got = memory.download(y_all.rows(0, min(rows + 1, FP8_ROWS[-1])))
        assert np.isfinite(got[:rows].astype(np.float32)).all(), key
        assert np.isnan(got[rows:].astype(np.float32)).all(), f"{key} wrote beyond its rows"
        largest, mean = FP8_ERRORS[key.accumulates_fast]
        got = got[:rows, columns].astype(np.float64)
        assert_close(str(key), got, want[:rows], rtol=2**-8, atol=largest * size[:rows])
        error = (got - want[:rows]) / size[:rows]
        assert np.sqrt(np.mean(error**2)) < mean + 2**-9, f"{key}: more than rounding to bf16 explains"


def test_products_of_e4m3_that_cannot_be_are_refused(planner: GemmPlanner) -> None:
    with pytest.raises(ValueError, match=r"16×104×64 e4m3·e4m3→bf16 none: n and k .* multiples of 16"):
        planner.plan(GemmKey(16, 104, 64, x=DType.E4M3, w=DType.E4M3))
    with pytest.raises(ValueError, match="take no epilogue"):
        planner.plan(GemmKey(16, 64, 64, x=DType.E4M3, w=DType.E4M3, epilogue=Epilogue.ADD))


def test_a_product_the_library_has_not_is_named(planner: GemmPlanner) -> None:
    with pytest.raises(CudaError, match=r"4×64×32 f32·bf16→bf16 none.* failed: .*cuBLASLt"):
        planner.plan(GemmKey(4, 64, 32, x=DType.F32))


def test_tuning_stays_within_its_scratch(planner: GemmPlanner, memory: Memory) -> None:
    """With room for one copy of the weights it still tunes, and writes nothing beyond."""
    key = GemmKey(48, 1024, 1024)
    needed = WORKSPACE_BYTES + (48 * 1024 * 2 + 1024 * 1024) * 2
    block = memory.empty((needed + (1 << 20),), DType.U8)
    assert planner.plan_all([key], scratch=Tensor(block.address, (needed,), DType.U8)) == 1
    assert (memory.download(block)[needed:] == 0xFF).all()
    with pytest.raises(ValueError, match="too small"):
        planner.plan_all([GemmKey(49, 1024, 1024)], scratch=Tensor(block.address, (needed - 9999,), DType.U8))
