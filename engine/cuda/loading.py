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
from engine.cuda.owned import Owned
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
    """As load_cuda_engine, of a checkpoint that is open; options.model is not looked at.

    What fails, be it interrupted, gives back all memory, streams and modules that it has made.
    """
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
        with self._timed("total"), ThreadPoolExecutor(1, "kernels") as pool, Owned() as made:
            with self._timed("context"):
                self._device = made.add(Device.open(self._options.device))
            compiling = pool.submit(self._compile)
            self._plan = self._make_plan()
            engine = self._make(made, compiling)
            made.release()
        return engine

    def _make(self, made: Owned, compiling: Future[KernelLibrary]) -> CudaEngine:
        """The engine; `made` gets what it consists of in the order opposite to that of CudaEngine.close."""
        device, stager, results = self._device, self._plan.stager, self._plan.results
        stream = made.add(device.stream(priority=1))
        arena = made.add(Arena.allocate(self._plan.layout, device))
        self._clear(arena, stream)
        buffers = Buffers(self._plan.buffers, arena)
        report = self._load_weights(arena, buffers)
        library = made.add(self._compiled_library(compiling))
        self._load_modules(library)
        planner = made.add(GemmPlanner(device, cache_folder=self._settings.gemm_folder))
        parts = self._parts(arena, buffers, library, planner)
        self._tune(planner, parts, arena, stream)
        flights = made.add(Flights(FLIGHTS, stager.region, results))
        programs = made.add(self._programs(parts, results.on_device(arena), stream))
        made.then(
            device.synchronize
        )  # graphs are uploaded meanwhile; all else is waited for where it is made
        self._capture(programs, stream)
        capacity = self._capacity()
        engine_parts = EngineParts(
            device=device,
            arena=arena,
            library=library,
            planner=planner,
            stream=stream,
            buffers=buffers,
            ledger=Ledger(self._limits(capacity)),
            stager=stager,
            slots=SlotControl(library, buffers, stager.region, parts.staging, stream),
            programs=programs,
            flights=flights,
            collector=Collector(results, results.on_device(arena), stream),
        )
        return CudaEngine(engine_parts, self._describe(report, planner), capacity, self._seconds)

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

    def _clear(self, arena: Arena, stream: Stream) -> None:
        """To zeros: slot state starts so, and no page holds a NaN."""
        with self._timed("allocation"):
            stream.fill(arena.address, 0, arena.bytes)
            stream.synchronize()

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
        with Owned() as made, _as_engine_error():
            return load_weights(
                self._checkpoint,
                arena,
                self._device,
                precision=tier,
                library=made.add(self._build(units)) if units else None,
                progress=lambda _, share: self._hear("weights", share),
            )

    def _compiled_library(self, compiling: Future[KernelLibrary]) -> KernelLibrary:
        while not wait([compiling], _REPORT_SECONDS).done:
            self._hear("kernels", self._compiled)
        with _as_engine_error():
            return compiling.result()

    def _load_modules(self, library: KernelLibrary) -> None:
        """All: a module must not be loaded during a capture."""
        with self._timed("modules"), _as_engine_error():
            library.load_all()

    def _parts(self, arena: Arena, buffers: Buffers, library: KernelLibrary, planner: GemmPlanner) -> Parts:
        return Parts(
            config=self._config,
            weights=weights_in(arena, self._config, self._plan.tier.precision),
            buffers=buffers,
            staging=self._plan.stager.region.on_device(arena),
            library=library,
            limits=self._device.limits,
            planner=planner,
            skinny=self._settings.skinny,
        )

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

    def _programs(self, parts: Parts, results: Arena, stream: Stream) -> Programs:
        plan, graphs = self._plan, self._settings.graphs
        return Programs(parts, results, stream, widths=plan.widths, sizes=plan.sizes, graphs=graphs)

    def _capture(self, programs: Programs, stream: Stream) -> None:
        with self._timed("graphs"):
            if self._settings.capture:
                programs.capture_all(lambda share: self._hear("graphs", share))
            stream.synchronize()

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


@contextmanager
def _as_engine_error() -> Iterator[None]:
    """Kernels that fail, in the words of who asks for an engine."""
    try:
        yield
    except KernelError as error:
        raise EngineError(str(error)) from error


def _scratch(arena: Arena, layout: Layout, least: int) -> Tensor | None:
    """Memory of the arena to tune in before it is used: the KV pages or the activations, whichever are more.
    None if neither has `least` bytes; then tuning takes some beside the arena for the time.
    """
    blocks = (layout.span("kv_pages"), layout.span("activations", "workspaces", "logits"))
    offset, size = max(blocks, key=lambda block: block[1])
    return Tensor(arena.address + offset, (size,), DType.U8) if size >= least else None
