"""The reference engine: carries out step plans, one after the other, inside execute(). Knows no request."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

import numpy as np

from engine.checkpoint import Checkpoint
from engine.interface import (
    Engine,
    EngineCapacity,
    EngineError,
    EngineInfo,
    Progress,
    StepHandle,
    StepPlan,
    StepResult,
)
from engine.memory_plan import MemoryPlan
from engine.options import EngineOptions, KvDtype, Precision, StepSizes
from engine.plan_check import PlanLimits, check_plan
from engine.reference.holding import Holding
from engine.reference.memory import parameter_count, plan_memory
from engine.reference.model import ReferenceModel
from engine.reference.slots import Slots
from engine.reference.step import Step
from engine.reference.threads import BlasThreads

SUITED_SIZES = StepSizes(max_sequences=16, max_step_tokens=2048, prefill_tokens_beside_decodes=32)
"""32 rows of a prompt cost about as much as a decode step of a few, which is bound by reading the weights."""


class ReferenceEngine(Engine):
    """A model on the host's cores, in float32.

    What a sequence gets depends on its own tokens alone, bit for bit: not on what shares its batch, how
    its prompt is cut into chunks, or which pages came from another slot. Two things are excepted: a model
    with recurrent state that is resumed runs its output as prompt, in another form of the recurrence,
    which agrees closely. So are the smallest values of an fp8 KV cache, which a page's growing scale may
    round once more. See row_widths for the ground this stands on, and `info.fallbacks` if the host's BLAS
    does not give it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: EngineOptions,
        progress: Progress | None = None,
        *,
        fp8_activations: bool = False,
    ) -> None:
        """Loads the weights; the checkpoint may be closed afterwards. Raises ModelError.

        fp8_activations: as in Holding, to compare with the CUDA engine.
        """
        config = checkpoint.config
        sizes = options.sizes(SUITED_SIZES)
        memory = plan_memory(config, options, sizes)
        holding = Holding(options.precision, options.kv_dtype, fp8_activations)
        self._threads = BlasThreads(options.threads)
        self._model: ReferenceModel | None = ReferenceModel(
            checkpoint, pages=memory.pages, slots=sizes.max_sequences, progress=progress, holding=holding
        )
        self._slots = Slots(sizes.max_sequences, memory.max_sequence_length, config.vocab_size)
        self.capacity = EngineCapacity(
            slots=sizes.max_sequences,
            pages=memory.pages,
            max_sequence_length=memory.max_sequence_length,
            max_step_tokens=sizes.max_step_tokens,
            pipeline_depth=1,
            prefix_cacheable=not config.has_recurrent_state,
            prefill_tokens_beside_decodes=sizes.prefill_tokens_beside_decodes,
        )
        self._limits = PlanLimits(self.capacity, config.vocab_size)
        self.info = _describe(self._model, memory, self._threads, holding)

    def execute(self, plan: StepPlan) -> StepHandle:
        """Computes the step before it returns."""
        if self._model is None:
            raise EngineError("the engine is closed")
        check_plan(plan, self._slots, self._limits)
        began = perf_counter()
        try:
            with np.errstate(all="ignore"):
                result = Step(plan, self._model, self._slots).run()
        except MemoryError as error:
            raise EngineError(f"step {plan.step} ran out of memory: {error}") from error
        result.stage_us["step"] = (perf_counter() - began) * 1e6
        return _FinishedStep(result)

    def close(self) -> None:
        if self._model is not None:
            self._model = None
            self._threads.close()


class _FinishedStep(StepHandle):
    """A step that was over before its handle was made."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def is_done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result


def _describe(
    model: ReferenceModel, memory: MemoryPlan, threads: BlasThreads, holding: Holding
) -> EngineInfo:
    config = model.config
    return EngineInfo(
        engine="reference",
        architecture=config.architecture,
        device=f"{_processor()}, {threads.count} threads",
        weight_dtype=_dtype(holding.precision),
        kv_dtype=_dtype(holding.kv_dtype),
        parameters=parameter_count(config),
        layers=config.n_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        memory_plan=memory.bytes_by_purpose,
        fallbacks=(*holding.notes(), *model.fallbacks(), *([memory.shortened] if memory.shortened else [])),
        versions={"numpy": version("numpy"), "blas": threads.library},
    )


def _dtype(choice: Precision | KvDtype) -> str:
    return "float32" if choice == Precision.AUTO else str(choice)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
