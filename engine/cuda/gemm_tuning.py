"""Times the algorithms that cuBLASLt offers for a product, and picks one.

The heuristic's first choice is 5–20% off for skinny shapes. Candidates run as they will be used: captured
into a graph (an algorithm that cannot be captured is out), each call with another copy of the weights so that
these come from device memory as they do in a model, on random operands (zeros rank differently).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from engine.cuda.cublaslt import DETERMINISTIC_REDUCTIONS, Algorithm, Library, Product
from engine.cuda.device import CudaError, Device, Event, Stream, check, check_freed
from engine.cuda.gemm_cache import Tuned
from engine.cuda.gemm_key import Epilogue, GemmKey
from engine.cuda.gemm_plan import Gemm, GemmPlan
from engine.cuda.memory import aligned
from engine.quantization.fp8 import E4M3_MAX
from kernels.launch import BROKEN_CONTEXT
from kernels.tensor import DType, Tensor

CANDIDATES = 32
"""Algorithms asked for, with and without workspace; the library names 8 of each at most."""
_FINALISTS = 4
_TRIES = 3
"""Timed replays of every candidate."""
_FINAL_TRIES = 9
_HOPELESS = 1.5
"""A candidate so many times slower than the best so far is not timed again."""
_WORTHWHILE = 0.99
"""To replace the heuristic's first choice, another must take at most this share of its time."""
_L2_MULTIPLE = 5
"""All copies of the weights together against L2, so that none is still there when its turn comes again."""
_MOST_COPIES = 64
_FEWEST_CALLS = 2
_NOISE_ELEMENTS = (1 << 20) + 8
"""Of each block of noise that operands are filled from; not a power of two, so that rows differ."""
_WEIGHT_SPREAD = 0.02
"""Standard deviation of bf16 weights; the inputs' is 1, as behind a norm."""
_FP8_SPREAD = 100.0
"""Of e4m3, weights and inputs: normal rows whose largest magnitude is 448."""
_NUMPY_TYPES: dict[DType, Any] = {
    DType.BF16: ml_dtypes.bfloat16,
    DType.E4M3: ml_dtypes.float8_e4m3fn,
    DType.F32: np.float32,
}


@dataclass(frozen=True, slots=True)
class Operands:
    """Where a product's operands lie while it is tuned."""

    x: Tensor
    weights: tuple[Tensor, ...]
    """Copies, each to be used in turn."""
    y: Tensor
    c: Tensor | None
    bias: Tensor | None
    workspace: Tensor

    def bound(self, plan: GemmPlan, weights: Tensor) -> Gemm:
        return plan.bind(x=self.x, w=weights, y=self.y, c=self.c, bias=self.bias, workspace=self.workspace)


class Tuner:
    """Tunes products one after the other, in one block of device memory."""

    def __init__(self, device: Device, library: Library, scratch: Tensor, workspace_bytes: int) -> None:
        """scratch: u8; see scratch_bytes(). The device should be idle."""
        self._library = library
        self._scratch = scratch
        self._workspace_bytes = workspace_bytes
        self._l2_bytes = device.limits.l2_bytes
        self._stream = device.stream()
        self._events = (Event(timing=True), Event(timing=True))
        self._noise = cache(_noise)

    def tune(self, key: GemmKey, *, reductions: int = DETERMINISTIC_REDUCTIONS) -> Tuned:
        """The fastest algorithm. Raises CudaError if none works, ValueError if scratch is too small."""
        operands = self._operands(key)
        product = Product(key)
        try:
            candidates = self._library.candidates(
                product, CANDIDATES, self._workspace_bytes, reductions=reductions
            )
            return self._race(product, operands, candidates)
        finally:
            product.close()

    def time(self, key: GemmKey, *algorithms: Algorithm) -> list[float]:
        """Microseconds of each, as tune() measures its finalists. Raises CudaError if one does not work."""
        operands = self._operands(key)
        product = Product(key)
        try:
            return self._final(product, operands, algorithms)
        finally:
            product.close()

    def _race(self, product: Product, operands: Operands, candidates: Sequence[Algorithm]) -> Tuned:
        """Times all briefly, the best and the heuristic's first at length."""
        times: dict[int, float] = {}
        for rank, algorithm in enumerate(candidates):
            time = self._brief(product, operands, algorithm, min(times.values(), default=float("inf")))
            if time is not None:
                times[rank] = time
        if not times:
            count = len(candidates)
            raise CudaError(f"tuning {product.key}", 0, f"none of {count} algorithms runs in a graph")
        first = min(times)
        best = sorted(times, key=times.__getitem__)[:_FINALISTS]
        finalists = list(dict.fromkeys([first, *best]))
        final = self._final(product, operands, [candidates[rank] for rank in finalists])
        winner = min(range(len(finalists)), key=final.__getitem__)
        if final[winner] > _WORTHWHILE * final[0]:
            winner = 0
        return Tuned(candidates[finalists[winner]], final[winner], final[0])

    def _brief(self, product: Product, operands: Operands, algorithm: Algorithm, best: float) -> float | None:
        """Microseconds, or None for an algorithm that fails or cannot be captured. best: of those before."""
        try:
            with self._entered(product, operands, algorithm) as graph:
                times = [self._replay(graph)]
                if times[0] <= best * _HOPELESS:
                    times += [self._replay(graph) for _ in range(_TRIES - 1)]
                return statistics.median(times)
        except CudaError as error:
            if error.status in BROKEN_CONTEXT:  # which takes every other candidate with it
                raise
            return None

    def _final(self, product: Product, operands: Operands, algorithms: Sequence[Algorithm]) -> list[float]:
        """Microseconds of each. They take turns: a GPU at its power limit slows down for all alike."""
        with ExitStack() as stack:
            graphs = [stack.enter_context(self._entered(product, operands, a)) for a in algorithms]
            rounds = [[self._replay(graph) for graph in graphs] for _ in range(_FINAL_TRIES)]
        return [statistics.median(times) for times in zip(*rounds, strict=True)]

    @contextmanager
    def _entered(self, product: Product, operands: Operands, algorithm: Algorithm) -> Iterator[_Graph]:
        """A graph that calls the algorithm once per copy of the weights, replayed once already."""
        plan = GemmPlan(self._library.handle, product, algorithm, is_tuned=False)
        try:
            calls = [operands.bound(plan, weights) for weights in operands.weights]
            graph = _Graph(self._stream, calls * -(-_FEWEST_CALLS // len(calls)))
            try:
                self._replay(graph)
                yield graph
            finally:
                graph.close()
        finally:
            plan.close()

    def _replay(self, graph: _Graph) -> float:
        """Microseconds per call of one replay."""
        start, end = self._events
        self._stream.record(start)
        graph.launch()
        self._stream.record(end)
        end.synchronize()
        return end.milliseconds_since(start) * 1e3 / graph.calls

    def _operands(self, key: GemmKey) -> Operands:
        """Cuts the scratch up for a product and fills it with noise."""
        cut = _Cutter(self._scratch)
        workspace = cut.tensor((self._workspace_bytes,), DType.U8)
        x = cut.tensor((key.rows, key.k), key.x)
        y = cut.tensor((key.rows, key.n), key.y)
        c = cut.tensor((key.rows, key.n), key.y) if key.epilogue is Epilogue.ADD else None
        bias = cut.tensor((key.n,), key.y) if key.epilogue is Epilogue.BIAS else None
        weights = [cut.tensor((key.n, key.k), key.w)]
        for _ in range(min(copies(key, self._l2_bytes), cut.room_for(weights[0])) - 1):
            weights.append(cut.tensor((key.n, key.k), key.w))
        for tensor in (x, c, bias):
            if tensor is not None:
                self._fill(tensor, _FP8_SPREAD if tensor.dtype is DType.E4M3 else 1.0)
        for tensor in weights:
            self._fill(tensor, _FP8_SPREAD if tensor.dtype is DType.E4M3 else _WEIGHT_SPREAD)
        self._stream.synchronize()
        return Operands(x, tuple(weights), y, c, bias, workspace)

    def _fill(self, tensor: Tensor, spread: float) -> None:
        """Noise of that standard deviation: copied from the host once, doubled on the device from then on."""
        noise = self._noise(spread, tensor.dtype)
        done = min(noise.nbytes, tensor.bytes)
        self._stream.copy_to_device(tensor.address, noise.ctypes.data, done)
        while done < tensor.bytes:
            size = min(done, tensor.bytes - done)
            self._stream.copy_on_device(tensor.address + done, tensor.address, size)
            done += size

    def close(self) -> None:
        """Idempotent."""
        self._stream.close()
        for event in self._events:
            event.close()


def copies(key: GemmKey, l2_bytes: int) -> int:
    """Of the weights to go through in turn, so that each is read from device memory again."""
    return min(_MOST_COPIES, -(-_L2_MULTIPLE * l2_bytes // key.weight_bytes))


def scratch_bytes(key: GemmKey, l2_bytes: int, workspace_bytes: int) -> int:
    """Device memory that tuning a key takes with all its copies; with less it makes do with fewer."""
    sizes = [workspace_bytes, key.rows * key.k * key.x.bytes]
    sizes += [key.rows * key.n * key.y.bytes] * (2 if key.epilogue is Epilogue.ADD else 1)
    sizes += [key.n * key.y.bytes] + [key.weight_bytes] * copies(key, l2_bytes)
    return sum(aligned(size) for size in sizes)


class _Cutter:
    """Cuts tensors off a block of memory."""

    def __init__(self, block: Tensor) -> None:
        self._next = aligned(block.address)
        self._end = block.address + block.bytes

    def tensor(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Raises ValueError beyond the end."""
        tensor = Tensor(self._next, shape, dtype)
        self._next += aligned(tensor.bytes)
        if self._next > self._end:
            raise ValueError(f"the scratch memory for tuning is {self._next - self._end} B too small")
        return tensor

    def room_for(self, tensor: Tensor) -> int:
        """How many more like this one, plus one."""
        return 1 + (self._end - self._next) // aligned(tensor.bytes)


class _Graph:
    """Calls captured into a graph. Raises CudaError if they cannot be."""

    def __init__(self, stream: Stream, calls: Sequence[Gemm]) -> None:
        self.calls = len(calls)
        self._stream = stream
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(driver.cuStreamBeginCapture(stream.handle, mode), "starting a capture")
        try:
            for call in calls:
                call(stream.handle)
        finally:
            ended = driver.cuStreamEndCapture(stream.handle)
        graph = check(ended, "ending a capture")
        try:
            self._executable = check(driver.cuGraphInstantiate(graph, 0), "instantiating a graph")
        finally:
            check(driver.cuGraphDestroy(graph), "destroying a graph")

    def launch(self) -> None:
        check(driver.cuGraphLaunch(self._executable, self._stream.handle), "launching a graph")

    def close(self) -> None:
        check_freed(driver.cuGraphExecDestroy(self._executable), "destroying a graph")


def _noise(spread: float, dtype: DType) -> NDArray[Any]:
    """Normal random numbers of that standard deviation, within what e4m3 can hold."""
    values = np.random.default_rng(0).standard_normal(_NOISE_ELEMENTS, np.float32) * np.float32(spread)
    return values.clip(-E4M3_MAX, E4M3_MAX).astype(_NUMPY_TYPES[dtype])
