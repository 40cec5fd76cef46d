"""The CUDA engine: enqueues step plans and returns at once; the device samples, stops and moves on by itself.

Knows slots and rows; no request, no RPC, no queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from engine.cuda.buffers import Buffers
from engine.cuda.device import Device, Stream, check
from engine.cuda.gemm import GemmPlanner
from engine.cuda.ledger import Ledger
from engine.cuda.memory import Arena
from engine.cuda.owned import Owned
from engine.cuda.programs import Programs
from engine.cuda.slot_state import SlotControl
from engine.cuda.staging import Stager
from engine.cuda.step import Collector, CudaStep, Flight, Flights
from engine.cuda.work import PrefillWork, SampleWork, StepWork
from engine.interface import Engine, EngineCapacity, EngineError, EngineInfo, StepHandle, StepPlan
from kernels.errors import KernelError
from kernels.launch import KernelLibrary

PIPELINE_DEPTH = 2
FLIGHTS = PIPELINE_DEPTH + 2
"""Steps whose memory is kept apart: those under way, the one being staged, and one not collected yet."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What loading has made; the engine owns all of it."""

    device: Device
    arena: Arena
    library: KernelLibrary
    planner: GemmPlanner
    stream: Stream
    buffers: Buffers
    ledger: Ledger
    stager: Stager
    slots: SlotControl
    programs: Programs
    flights: Flights
    collector: Collector


class CudaEngine(Engine):
    """A model on one GPU. Made by loading.load_cuda_engine.

    What a sequence gets depends on its own tokens alone, for as long as its rows run in buckets of the same
    size: another bucket may use another matrix product, whose sums are rounded elsewhere.
    """

    def __init__(
        self, parts: EngineParts, info: EngineInfo, capacity: EngineCapacity, startup: dict[str, float]
    ) -> None:
        self.info = info
        self.capacity = capacity
        self.startup = startup
        """Seconds of loading, by part; parts overlap."""
        self._parts: EngineParts | None = parts
        self._broken: EngineError | None = None

    def execute(self, plan: StepPlan) -> StepHandle:
        """Stages the plan, enqueues its work and returns; nothing here waits for the device."""
        parts = self._usable()
        parts.ledger.check(plan)
        parts.ledger.apply(plan)
        with self._breaking(plan):
            flight = parts.flights.take()
            parts.stream.record(flight.begun)
            work = self._change_slots(parts, plan, flight)
            if work.prefill is not None:
                self._prefill(parts, work.prefill, flight)
            if work.decode is not None:
                self._decode(parts, work.decode, flight)
            parts.stream.record(flight.done)
            return CudaStep(flight, parts.flights.enqueued(flight), work, parts.ledger)

    @property
    def parts(self) -> EngineParts:
        """For measuring and checking. Raises EngineError once closed or broken."""
        return self._usable()

    def peek_logits(self, row: int) -> NDArray[np.float32]:
        """A row of the logits that the last group of rows sampled from, float32 [vocab]. Waits."""
        parts = self._usable()
        logits = parts.buffers.logits.logits.rows(row, row + 1)
        host = np.empty(logits.shape[1], np.float32)
        parts.stream.synchronize()
        check(driver.cuMemcpyDtoH(host.ctypes.data, logits.address, logits.bytes), "reading logits")
        return host

    def close(self) -> None:
        parts, self._parts = self._parts, None
        if parts is None or self._broken is not None:  # a broken context frees nothing; the process is to end
            return
        parts.device.make_current()
        with Owned() as made:
            for part in (parts.device, parts.stream, parts.arena, parts.library, parts.planner):
                made.add(part)
            made.add(parts.flights)
            made.add(parts.programs)
            parts.device.synchronize()

    def _change_slots(self, parts: EngineParts, plan: StepPlan, flight: Flight) -> StepWork:
        """New sequences, positions and pages, and the lists of the step's rows."""
        if plan.starts:
            parts.slots.start(plan.starts, flight.staging)
        work = parts.stager.stage(plan, flight.staging, parts.ledger)
        parts.slots.change(work, flight.staging)
        return work

    def _prefill(self, parts: EngineParts, work: PrefillWork, flight: Flight) -> None:
        """One ragged pass, the first tokens of the prompts that end in it, and prompt log-probabilities."""
        programs, collector = parts.programs, parts.collector
        programs.prefill[work.size].launch()
        if work.first_tokens is not None:
            programs.first_tokens[work.first_tokens.key].launch()
            collector.sampled("first", work.first_tokens, flight.results)
        if work.prompt_entries:
            for group in range(-(-work.prompt_entries // parts.buffers.plan.sizes.logit_rows)):
                programs.prompt_logprobs[group].launch()
            collector.prompt(work.prompt_entries, flight.results)
        for row, slot in work.carried:
            parts.buffers.carry(parts.stream, row, slot)

    def _decode(self, parts: EngineParts, work: SampleWork, flight: Flight) -> None:
        parts.programs.decode[work.key].launch()
        parts.collector.sampled("decode", work, flight.results)

    def _usable(self) -> EngineParts:
        if self._broken is not None:
            raise EngineError(f"the engine is broken: {self._broken}")
        if self._parts is None:
            raise EngineError("the engine is closed")
        return self._parts

    @contextmanager
    def _breaking(self, plan: StepPlan) -> Iterator[None]:
        """What fails in here leaves the device in an unknown state."""
        try:
            yield
        except (EngineError, KernelError) as error:
            self._broken = EngineError(f"step {plan.step}: {error}")
            raise self._broken from error
