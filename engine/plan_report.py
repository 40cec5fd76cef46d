"""What serving a model on a GPU would take, before anything is loaded: all that `slipstream plan` shows.

Sizes come from engine.cuda.planning, by which the server itself allocates. Needs no GPU if a size is stated;
importing this imports no CUDA. Knows no command line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ModelError
from engine.interface import PAGE_SIZE, pages_for
from engine.options import EngineOptions, KvDtype, Precision

if TYPE_CHECKING:
    from engine.config import ModelConfig
    from engine.cuda.planning import EnginePlan
    from kernels.device import DeviceLimits

USUAL_CONTEXT = 4096
"""Tokens for which the largest batch is told, besides the model's full length."""

CONTEXT_BYTES = 528 << 20
"""What the CUDA context takes of a device before anything else, where none can be asked; an H200's."""

_NEEDED = ("cuda", "cuda.bindings", "nvmath")
_HOPPER = ((9, 0), 132, 227 << 10, 50 << 20)
"""Capability, multiprocessors, shared memory of a block and L2 of an H100 or H200, which a stated size is
taken for. Others differ by some MB of attention workspace."""


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """The memory to plan for."""

    name: str
    limits: DeviceLimits
    total_bytes: int
    free_bytes: int
    """With a context, and nothing of ours in it."""


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """Bytes that something takes."""

    name: str
    bytes: int
    about: str


@dataclass(frozen=True, slots=True)
class Outlook:
    """What one choice of precisions would come to."""

    precision: Precision
    kv_dtype: KvDtype
    weights_bytes: int = 0
    kv_tokens: int = 0
    longest: int = 0
    """Tokens of one sequence."""
    batch_usual: int = 0
    """Sequences of USUAL_CONTEXT tokens at once."""
    batch_full: int = 0
    """Sequences of the model's full length at once."""
    refusal: str | None = None
    """Why this choice cannot be had."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan and its alternatives. Sizes are in bytes."""

    path: Path
    architecture: str
    model_length: int
    device: str
    total_bytes: int
    held_bytes: int
    """By the CUDA context and by others."""
    memory_fraction: float
    budget_bytes: int
    precision: Precision
    kv_dtype: KvDtype
    notes: tuple[str, ...]
    parts: tuple[PlannedPart, ...]
    """They sum to what the server takes."""
    bytes_by_purpose: dict[str, int]
    """The same as GetStatus has it."""
    kv_pages: int
    kv_bytes_per_token: int
    max_sequences: int
    max_step_tokens: int
    max_sequence_length: int
    outlooks: tuple[Outlook, ...]
    """All precisions, with these options; the chosen one among them."""

    @property
    def kv_tokens(self) -> int:
        return self.kv_pages * PAGE_SIZE

    @property
    def planned_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


def plan_model(path: Path, options: EngineOptions, device: DeviceFigures) -> PlanReport:
    """Plans a model folder, a .gguf file, or a config.json without weights.

    Raises ModelError for a model that cannot be read or run and, with what to lower, for sizes that do not
    fit.
    """
    config, own = read_model(path)
    planner = _Planner(config, own, options, device)
    plan = planner.plan(options)
    memory, tier = plan.memory, plan.tier
    return PlanReport(
        path=path,
        architecture=config.architecture,
        model_length=config.max_sequence_length,
        device=device.name,
        total_bytes=device.total_bytes,
        held_bytes=device.total_bytes - device.free_bytes,
        memory_fraction=options.memory_fraction,
        budget_bytes=plan.budget.bytes,
        precision=tier.precision,
        kv_dtype=tier.kv_dtype,
        notes=(*tier.fallbacks, *([memory.shortened] if memory.shortened else [])),
        parts=tuple(_parts(plan)),
        bytes_by_purpose=memory.bytes_by_purpose,
        kv_pages=memory.pages,
        kv_bytes_per_token=plan.buffers.page_bytes() // PAGE_SIZE,
        max_sequences=plan.step.max_sequences,
        max_step_tokens=plan.step.max_step_tokens,
        max_sequence_length=memory.max_sequence_length,
        outlooks=tuple(planner.outlooks()),
    )


def plan_engine_for(path: Path, options: EngineOptions, device: DeviceFigures) -> EnginePlan:
    """The plan itself, for what else can be told of it. Raises ModelError."""
    config, own = read_model(path)
    return _Planner(config, own, options, device).plan(options)


def plan_outlooks(path: Path, options: EngineOptions, device: DeviceFigures) -> tuple[Outlook, ...]:
    """What each choice of precisions would come to, where the one asked for does not fit. Raises ModelError
    for a model that cannot be read.
    """
    config, own = read_model(path)
    return tuple(_Planner(config, own, options, device).outlooks())


def gpu_figures(index: int) -> DeviceFigures:
    """Of a GPU of this machine; creates a context on it for as long as it asks. Raises ModelError."""
    _require_cuda()
    from engine.cuda.device import Device

    device = Device.open(index)
    try:
        return DeviceFigures(device.name, device.limits, device.total_bytes, device.free_bytes())
    finally:
        device.close()


def stated_figures(total_bytes: int) -> DeviceFigures:
    """Of a GPU of that size that nobody else uses. Raises ModelError if CUDA's Python parts are missing."""
    _require_cuda()
    from kernels.device import DeviceLimits

    name = "a GPU of that size, taken for an H100 or H200"
    return DeviceFigures(name, DeviceLimits(*_HOPPER), total_bytes, max(0, total_bytes - CONTEXT_BYTES))


class _Planner:
    """Plans one model on one device, in any precision."""

    def __init__(
        self, config: ModelConfig, own: Precision, options: EngineOptions, device: DeviceFigures
    ) -> None:
        from engine.cuda.memory import memory_budget
        from engine.cuda.settings import CudaSettings

        self._config = config
        self._own = own
        self._options = options
        self._device = device
        self._settings = CudaSettings()
        self._budget = memory_budget(device.total_bytes, device.free_bytes, options.memory_fraction)

    def plan(self, options: EngineOptions) -> EnginePlan:
        """Raises ModelError."""
        from engine.cuda.planning import plan_engine

        return plan_engine(
            self._config, options, self._settings, self._device.limits, own=self._own, budget=self._budget
        )

    def outlooks(self) -> Iterator[Outlook]:
        for precision in (Precision.BF16, Precision.FP8, Precision.Q4):
            for kv_dtype in (KvDtype.BF16, KvDtype.FP8):
                yield self._outlook(replace(self._options, precision=precision, kv_dtype=kv_dtype))

    def _outlook(self, options: EngineOptions) -> Outlook:
        try:
            plan = self.plan(options)
        except ModelError as error:
            return Outlook(options.precision, options.kv_dtype, refusal=str(error))
        full = self._config.max_sequence_length
        return Outlook(
            precision=options.precision,
            kv_dtype=options.kv_dtype,
            weights_bytes=plan.memory.bytes_by_purpose["weights"],
            kv_tokens=plan.memory.pages * PAGE_SIZE,
            longest=plan.memory.max_sequence_length,
            batch_usual=self._largest_batch(options, min(full, USUAL_CONTEXT)),
            batch_full=self._largest_batch(options, full),
        )

    def _largest_batch(self, options: EngineOptions, length: int) -> int:
        """Most sequences of that length at once, each with a slot, whose own cost is counted in."""
        from engine.cuda.buckets import MOST_WIDTH

        fits, fails = 0, MOST_WIDTH + 1
        while fits + 1 < fails:
            sequences = (fits + fails) // 2
            wanted = replace(options, max_sequences=sequences, max_sequence_length=length, kv_pages=None)
            try:
                plan = self.plan(wanted)
            except ModelError:
                fails = sequences
                continue
            if plan.memory.pages >= sequences * pages_for(length):
                fits = sequences
            else:
                fails = sequences
        return fits


def read_model(path: Path) -> tuple[ModelConfig, Precision]:
    """The configuration and the checkpoint's own precision, of its weights or, without any, its settings.

    Raises ModelError.
    """
    from engine.checkpoint import open_checkpoint
    from engine.config import ModelConfig
    from engine.files.json_file import read_json_object
    from engine.precision import own_precision, stored_elements

    settings = path / "config.json" if path.is_dir() else path
    has_weights = path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.safetensors*")))
    if has_weights:
        with open_checkpoint(path) as checkpoint:
            return checkpoint.config, own_precision(checkpoint.config, stored_elements(checkpoint))
    config = ModelConfig.from_hf(read_json_object(settings))
    return config, own_precision(config, Counter())


_WEIGHTS = {
    "embedding": "bf16, for looking tokens up",
    "attention": "q|k|v and o",
    "feed-forward": "gate|up and down",
    "head": "for the logits, where it is not the embedding itself",
    "norms": "and biases, bf16",
}
_PARTS = {
    "activations": "of one pass of max-step-tokens",
    "workspaces": "of attention and of matrix products",
    "logits": "float32, and what sampling takes",
    "slot_state": "counts, biases and block tables of max-sequences",
    "rope": "cosines and sines of all positions",
    "exchange": "what crosses from and to the host in a step",
    "staging": "where weights arrive to be converted",
    "graphs": "an allowance: 4 KiB for each of their nodes, of which 3.2 were measured",
    "reserve": "left free for kernel code and the driver's own",
    "kv_pages": "keys and values, 64 tokens a page",
}
_WORKSPACES = ("workspace", "scratch", "decode.", "decode_plan.")
"""Beginnings of names of what belongs to kernels."""


def _parts(plan: EnginePlan) -> Iterator[PlannedPart]:
    """Everything that is allocated, by what it is for; and what is left free."""
    from engine.cuda.memory import aligned
    from engine.cuda.weights import device_weights

    groups = {
        name: weight.group()
        for weight in device_weights(plan.config, plan.tier.precision)
        for name in weight.tensors()
    }
    sizes: Counter[str] = Counter()
    for name, place in plan.layout.reservations.items():
        is_workspace = place.part == "activations" and name.startswith(_WORKSPACES)
        sizes[groups.get(name) or ("workspaces" if is_workspace else place.part)] += aligned(place.bytes)
    sizes |= {name: plan.memory.bytes_by_purpose[name] for name in ("graphs", "reserve")}
    for name, about in _WEIGHTS.items():
        if sizes[name]:
            yield PlannedPart(f"weights: {name}", sizes.pop(name), about)
    for name, about in _PARTS.items():
        if sizes[name]:
            yield PlannedPart(name.replace("_", " "), sizes.pop(name), about)
    for name, size in sizes.items():
        if size:
            yield PlannedPart(name.replace("_", " "), size, "")


def _require_cuda() -> None:
    for module in _NEEDED:
        if find_spec(module) is None:
            raise ModelError(
                f"A plan is made by the CUDA engine's own parts, and {module} is not installed "
                "(pip install 'slipstream-serve[cuda]'; no GPU is needed)."
            )
