"""From a checkpoint to a CudaEngine: the one place that knows the order in which things are made.

Kernels compile while weights load; products are tuned and graphs captured once both are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from importlib.metadata import version
from math import prod
from time import perf_counter

from cuda.bindings import driver

from engine.checkpoint import Checkpoint, open_checkpoint
from engine.config import ModelConfig
from engine.cuda.buffers import Buffers, rope_values
from engine.cuda.device import Device, Stream, check, cuda_version_text, driver_version
from engine.cuda.engine import FLIGHTS, PIPELINE_DEPTH, CudaEngine, EngineParts
from engine.cuda.gemm import GemmPlanner, least_scratch
from engine.cuda.ledger import Ledger
from engine.cuda.memory import Arena, Layout, memory_budget
from engine.cuda.parts import Parts
from engine.cuda.planning import EnginePlan, plan_engine
from engine.cuda.programs import Programs, product_keys
from engine.cuda.settings import CudaSettings
from engine.cuda.slot_state import SlotControl
from engine.cuda.step import Collector, Flights
from engine.cuda.weight_loading import LoadReport, load_weights
from engine.cuda.weight_pieces import converting_units
from engine.cuda.weights import device_weights, weights_in
from engine.interface import EngineCapacity, EngineError, EngineInfo, Progress
from engine.options import EngineOptions
from engine.plan_check import PlanLimits
from engine.precision import own_precision, stored_elements
from kernels.compiler import CompileUnit, nvrtc_version
from kernels.errors import KernelError
from kernels.launch import KernelLibrary
from kernels.registry import all_units
from kernels.tensor import DType, Tensor

_REPORT_SECONDS = 0.2
"""Between reports on kernels that are still being compiled once the weights are there."""

_SHARES = {"weights": (0.0, 0.6), "kernels": (0.6, 0.7), "tuning": (0.7, 0.9), "graphs": (0.9, 1.0)}
"""Of the whole of loading, by stage: from … to."""


def load_cuda_engine(
    options: EngineOptions, progress: Progress | None = None, settings: CudaSettings | None = None
) -> CudaEngine:
    """Opens the model and makes an engine of it on GPU options.device.

    Raises ModelError (the model, the GPU or the sizes cannot be used), EngineError (the GPU fails).
    """
    with open_checkpoint(options.model) as checkpoint:
        return load_from(checkpoint, options, progress, settings)


def load_from(
    checkpoint: Checkpoint,
    options: EngineOptions,
    progress: Progress | None = None,
    settings: CudaSettings | None = None,
) -> CudaEngine:
    """As load_cuda_engine, of a checkpoint that is open; options.model is not looked at."""
    return _Loading(checkpoint, options, settings or CudaSettings(), progress).run()


class _Loading:
    """One loading under way."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: EngineOptions,
        settings: CudaSettings,
        progress: Progress | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._config: ModelConfig = checkpoint.config
        self._options = options
        self._settings = settings
        self._progress = progress
        self._seconds: dict[str, float] = {}
        self._compiled = 0.0
        """Share of the kernels that is compiled; written by the thread that does it."""

    def run(self) -> CudaEngine:
        with self._timed("total"), ThreadPoolExecutor(1, "kernels") as pool:
            with self._timed("context"):
                self._device = Device.open(self._options.device)
            compiling = pool.submit(self._compile)
            self._plan = plan = self._make_plan()
            stager, results = plan.stager, plan.results
            stream = self._device.stream(priority=1)
            arena = self._allocate(stream)
            buffers = Buffers(plan.buffers, arena)
            report = self._load_weights(arena, buffers)
            library = self._library(compiling)
            planner = GemmPlanner(self._device, cache_folder=self._settings.gemm_folder)
            parts = Parts(
                config=self._config,
                weights=weights_in(arena, self._config, plan.tier.precision),
                buffers=buffers,
                staging=stager.region.on_device(arena),
                library=library,
                limits=self._device.limits,
                planner=planner,
                skinny=self._settings.skinny,
            )
            self._tune(planner, parts, arena, stream)
            programs = self._capture(parts, results.on_device(arena), stream)
            capacity = self._capacity()
            made = EngineParts(
                device=self._device,
                arena=arena,
                library=library,
                planner=planner,
                stream=stream,
                buffers=buffers,
                ledger=Ledger(self._limits(capacity)),
                stager=stager,
                slots=SlotControl(library, buffers, stager.region, parts.staging, stream),
                programs=programs,
                flights=Flights(FLIGHTS, stager.region, results),
                collector=Collector(results, results.on_device(arena), stream),
            )
        return CudaEngine(made, self._describe(report, planner), capacity, self._seconds)

    def _make_plan(self) -> EnginePlan:
        device = self._device
        return plan_engine(
            self._config,
            self._options,
            self._settings,
            device.limits,
            own=own_precision(self._config, stored_elements(self._checkpoint)),
            budget=memory_budget(device.total_bytes, device.free_bytes(), self._options.memory_fraction),
        )

    # ---- parts, in order

    def _compile(self) -> KernelLibrary:
        with self._timed("kernels"):
            return self._build(all_units(), self._count_compiled)

    def _build(
        self, units: Sequence[CompileUnit], progress: Callable[[str, int, int], None] | None = None
    ) -> KernelLibrary:
        return KernelLibrary.build(
            units,
            self._device.limits.arch,
            cache_folder=self._settings.kernel_folder,
            progress=progress,
            dependent_launch=None if self._settings.dependent_launch else False,
        )

    def _allocate(self, stream: Stream) -> Arena:
        """One block, all zeros: slot state starts so, and no page holds a NaN."""
        with self._timed("allocation"):
            arena = Arena.allocate(self._plan.layout, self._device)
            stream.fill(arena.address, 0, arena.bytes)
            stream.synchronize()
        return arena

    def _load_weights(self, arena: Arena, buffers: Buffers) -> LoadReport:
        with self._timed("weights"):
            report = self._copy_weights(arena)
            for mixer in buffers.plan.ropes.values():
                table = buffers.rope(mixer)
                values = rope_values(mixer, buffers.plan.sizes.positions)
                for tensor, array in zip((table.cosines, table.sines), values, strict=True):
                    check(
                        driver.cuMemcpyHtoD(tensor.address, array.ctypes.data, array.nbytes), "copying rope"
                    )
            self._device.synchronize()  # no stream of ours waits for these copies
        return report

    def _copy_weights(self, arena: Arena) -> LoadReport:
        """The kernels that convert weights are built by themselves: all together may take long to compile."""
        tier = self._plan.tier.precision
        units = converting_units(tier)
        converting = self._build(units) if units else None
        try:
            return load_weights(
                self._checkpoint,
                arena,
                self._device,
                precision=tier,
                library=converting,
                progress=lambda _, share: self._hear("weights", share),
            )
        finally:
            if converting is not None:
                converting.close()

    def _library(self, compiling: Future[KernelLibrary]) -> KernelLibrary:
        """The compiled kernels, loaded: a module must not be loaded during a capture."""
        while not wait([compiling], _REPORT_SECONDS).done:
            self._hear("kernels", self._compiled)
        try:
            library = compiling.result()
            with self._timed("modules"):
                library.load_all()
        except KernelError as error:
            raise EngineError(str(error)) from error
        return library

    def _tune(self, planner: GemmPlanner, parts: Parts, arena: Arena, stream: Stream) -> None:
        if not self._settings.tune:
            return
        with self._timed("tuning"):
            keys = product_keys(parts, self._plan.widths, self._plan.sizes)
            scratch = _scratch(arena, self._plan.layout, least_scratch(keys))
            planner.plan_all(keys, scratch=scratch, progress=lambda share: self._hear("tuning", share))
            if scratch is not None:
                stream.fill(scratch.address, 0, scratch.bytes)
                stream.synchronize()

    def _capture(self, parts: Parts, results: Arena, stream: Stream) -> Programs:
        graphs = self._settings.graphs
        plan = self._plan
        programs = Programs(parts, results, stream, widths=plan.widths, sizes=plan.sizes, graphs=graphs)
        with self._timed("graphs"):
            if self._settings.capture:
                programs.capture_all(lambda share: self._hear("graphs", share))
            stream.synchronize()
        return programs

    # ---- what the engine says of itself

    def _capacity(self) -> EngineCapacity:
        step, memory = self._plan.step, self._plan.memory
        return EngineCapacity(
            slots=step.max_sequences,
            pages=memory.pages,
            max_sequence_length=memory.max_sequence_length,
            max_step_tokens=step.max_step_tokens,
            pipeline_depth=PIPELINE_DEPTH,
            prefix_cacheable=not self._config.has_recurrent_state,
            prefill_tokens_beside_decodes=step.prefill_tokens_beside_decodes,
        )

    def _limits(self, capacity: EngineCapacity) -> PlanLimits:
        shape = self._plan.buffers.slot_shape
        return PlanLimits(
            capacity,
            self._config.vocab_size,
            stop_token_ids=shape.max_stop,
            logit_biases=shape.max_bias,
        )

    def _describe(self, report: LoadReport, planner: GemmPlanner) -> EngineInfo:
        tier, memory = self._plan.tier, self._plan.memory
        fallbacks = [
            *tier.fallbacks,
            *(f"weights stored as {stored} were converted to bf16" for stored in report.converted),
            *(f"weights stored as {stored} were quantised anew" for stored in report.requantised),
        ]
        if memory.shortened:
            fallbacks.append(memory.shortened)
        return EngineInfo(
            engine="cuda",
            architecture=self._config.architecture,
            device=self._device.name,
            weight_dtype=str(tier.precision),
            kv_dtype=str(tier.kv_dtype),
            parameters=sum(prod(weight.shape) for weight in device_weights(self._config)),
            layers=self._config.n_layers,
            hidden_size=self._config.hidden_size,
            vocab_size=self._config.vocab_size,
            memory_plan=memory.bytes_by_purpose,
            fallbacks=tuple(fallbacks),
            versions={
                "driver": cuda_version_text(driver_version()),
                "nvrtc": ".".join(map(str, nvrtc_version())),
                "cublaslt": planner.library_version,
                "cuda-bindings": version("cuda-bindings"),
            },
        )

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self._seconds[part] = perf_counter() - began

    def _count_compiled(self, unit: str, done: int, total: int) -> None:
        self._compiled = done / total

    def _hear(self, stage: str, share: float) -> None:
        if self._progress is not None:
            start, end = _SHARES[stage]
            self._progress(stage, start + (end - start) * share)


def _scratch(arena: Arena, layout: Layout, least: int) -> Tensor | None:
    """Memory of the arena to tune in before it is used: the KV pages or the activations, whichever are more.
    None if neither has `least` bytes; then tuning takes some beside the arena for the time.
    """
    blocks = (layout.span("kv_pages"), layout.span("activations", "workspaces", "logits"))
    offset, size = max(blocks, key=lambda block: block[1])
    return Tensor(arena.address + offset, (size,), DType.U8) if size >= least else None
