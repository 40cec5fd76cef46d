"""Drives a CUDA engine by plans of its own, for measuring: sequences side by side, whole prompts, full pages.

Knows the engine's interface; what it looks up inside are KV pages, to fill them with noise. No figure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine.cuda.engine import CudaEngine
from engine.interface import (
    PAGE_SIZE,
    PageAssignment,
    PrefillChunk,
    Sampling,
    SlotStart,
    StepHandle,
    StepPlan,
    pages_for,
)
from kernels.tensor import DType, Tensor

GREEDY = Sampling(temperature=0.0)
DRAWN = Sampling(temperature=1.0, top_p=0.95, top_k=50, seed=5)
CHUNK = 2048
_NONE = np.zeros(0, np.int32)
_FP8_EXPONENT = 6
"""Noise is kept times 2⁶ in e4m3, under scales of 2⁻⁶."""


class Streams:
    """Sequences that decode side by side, two steps ahead of their results as serving does."""

    def __init__(
        self,
        engine: CudaEngine,
        count: int,
        context: int,
        length: int,
        sampling: Sampling,
        prompts: NDArray[np.int32] | None = None,
    ) -> None:
        """Starts `count` sequences at `context` tokens, of which all but the last are as if cached; or with
        whole prompts, int32 [count, context], as many in a pass as a step holds.

        length: most tokens of each, which decides its pages.
        """
        self._engine = engine
        self._slots = tuple(range(count))
        self._position = context
        self._pages_each = pages_for(length)
        self._under_way: deque[StepHandle] = deque()
        self.tokens = 0
        self.idle_us: list[float] = []
        self.step_us: list[float] = []
        together = 16
        if prompts is not None:
            together = max(1, engine.capacity.max_step_tokens // context)
        first_position = context - 1 if prompts is None else 0
        if prompts is None:
            prompts = random_tokens(engine, (count, 1), seed=context)
        for first in range(0, count, together):
            slots = self._slots[first : first + together]
            plan = StepPlan(
                0,
                starts=tuple(SlotStart(slot, sampling, _NONE, _NONE) for slot in slots),
                pages=tuple(self._page(slot, i) for slot in slots for i in range(pages_for(context))),
                prefills=tuple(PrefillChunk(slot, prompts[slot], first_position, True) for slot in slots),
            )
            self.tokens += len(engine.execute(plan).result().tokens)

    def _page(self, slot: int, index: int) -> PageAssignment:
        return PageAssignment(slot, index, slot * self._pages_each + index)

    def decode(self, steps: int) -> None:
        """Returns once the last step's tokens have come."""
        for _ in range(steps):
            pages: tuple[PageAssignment, ...] = ()
            if self._position % PAGE_SIZE == 0:
                index = self._position // PAGE_SIZE
                pages = tuple(self._page(slot, index) for slot in self._slots)
            self._under_way.append(self._engine.execute(StepPlan(1, pages=pages, decodes=self._slots)))
            self._position += 1
            if len(self._under_way) == 2:
                self._collect()
        while self._under_way:
            self._collect()

    def _collect(self) -> None:
        result = self._under_way.popleft().result()
        self.tokens += len(result.tokens)
        self.step_us.append(result.stage_us["step"])
        self.idle_us.append(result.stage_us["idle"])


def random_tokens(engine: CudaEngine, shape: tuple[int, int], seed: int) -> NDArray[np.int32]:
    """Ordinary tokens, int32 of `shape`."""
    return np.random.default_rng(seed).integers(3, engine.info.vocab_size, shape).astype(np.int32)


def prompt_plan(prompts: NDArray[np.int32], slots: Sequence[int]) -> StepPlan:
    """The slots' own prompts of int32 [slots, n], whole, in one pass."""
    each = pages_for(prompts.shape[1])
    return StepPlan(
        2,
        starts=tuple(SlotStart(slot, GREEDY, prompts[slot], _NONE) for slot in slots),
        pages=tuple(PageAssignment(slot, i, slot * each + i) for slot in slots for i in range(each)),
        prefills=tuple(PrefillChunk(slot, prompts[slot], 0, True) for slot in slots),
    )


def fill_pages(engine: CudaEngine) -> None:
    """Normal noise in all KV pages, never zeros: a block from the host, doubled on the device."""
    parts = engine.parts
    noise = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    for layer in range(engine.info.layers):
        for name in ("k", "v"):
            pages = parts.arena.tensor(f"kv.{layer}.{name}")
            if pages.dtype is DType.E4M3:
                values = (noise * 2.0**_FP8_EXPONENT).astype(ml_dtypes.float8_e4m3fn)
                scale = parts.arena.tensor(f"kv.{layer}.{name}_scale")
                _repeat(engine, scale, np.full(1, 2.0**-_FP8_EXPONENT, np.float32).view(np.uint8))
            else:
                values = noise.astype(ml_dtypes.bfloat16)
            _repeat(engine, pages, values.view(np.uint8))
    parts.stream.synchronize()


def _repeat(engine: CudaEngine, tensor: Tensor, pattern: NDArray[np.uint8]) -> None:
    """Fills a tensor's bytes with a pattern from the host, over and over."""
    from cuda.bindings import driver

    done = min(pattern.nbytes, tensor.bytes)
    driver.cuMemcpyHtoD(tensor.address, pattern.ctypes.data, done)
    engine.parts.device.synchronize()  # the engine's stream does not wait for this copy's
    while done < tensor.bytes:
        count = min(done, tensor.bytes - done)
        engine.parts.stream.copy_on_device(tensor.address + done, tensor.address, count)
        done += count
