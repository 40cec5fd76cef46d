"""What an engine will take, decided before a byte is allocated: precision, steps, buffers, arena, KV pages.

The one place this is decided: loading allocates what is planned here, and `slipstream plan` prints it. Needs
no GPU, only its figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from engine.config import ModelConfig
from engine.cuda.buckets import MOST_WIDTH, decode_widths, prefill_sizes
from engine.cuda.buffers import BufferPlan, BufferSizes
from engine.cuda.features import require_supported, why_not_kv_dtype, why_not_precision
from engine.cuda.memory import ALIGNMENT, Layout
from engine.cuda.regions import Region
from engine.cuda.sampling import results_region
from engine.cuda.settings import SUITED_SIZES, CudaSettings
from engine.cuda.staging import Stager
from engine.cuda.weight_pieces import reserve_staging
from engine.cuda.weights import device_weights, reserve_weights
from engine.errors import ModelError, UnsupportedModelError
from engine.memory_plan import MemoryBudget, MemoryPlan, fit_pages
from engine.options import EngineOptions, KvDtype, Precision, StepSizes
from engine.precision import chosen_kv_dtype, chosen_precision
from kernels.device import DeviceLimits
from kernels.tensor import DType

RESERVE_BYTES = 256 << 20
"""Left free beside the arena: kernel code, cuBLASLt and the driver's own. On an H200 they took 14 MiB."""

_NODE_BYTES = 4 << 10
"""Of a graph's node on the device: on an H200 47 graphs of 12,229 nodes took 38 MiB, 3.2 KiB each."""
_WIDTH_GRAPHS = 2**3
"""Greedy or not, with log-probabilities or without, for long sequences or not."""
_LAYER_NODES = 14
"""At most, of one layer in one graph: each of four products in up to two, two norms, rope, attention in two,
activation."""
_OTHER_NODES = 24
"""Of embedding, head and sampling."""

_KV_TYPES = {KvDtype.BF16: DType.BF16, KvDtype.FP8: DType.E4M3}


@dataclass(frozen=True, slots=True)
class Tier:
    """How weights and KV are held."""

    precision: Precision
    """Never AUTO."""
    kv_dtype: KvDtype
    """Never AUTO."""
    fallbacks: tuple[str, ...] = ()
    """What is held otherwise than one would expect, and why."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """All sizes of an engine."""

    config: ModelConfig
    tier: Tier
    step: StepSizes
    widths: tuple[int, ...]
    """Buckets of decode rows."""
    sizes: tuple[int, ...]
    """Buckets of prompt tokens."""
    buffers: BufferPlan
    stager: Stager
    results: Region
    layout: Layout
    """The arena's, KV pages included."""
    memory: MemoryPlan
    budget: MemoryBudget


def plan_engine(
    config: ModelConfig,
    options: EngineOptions,
    settings: CudaSettings,
    limits: DeviceLimits,
    *,
    own: Precision,
    budget: MemoryBudget,
) -> EnginePlan:
    """Plans an engine for a model.

    own: the checkpoint's own precision, for AUTO. budget: what the engine may take of the device.
    Raises UnsupportedModelError for a model or a precision that the engine or the GPU cannot run, ModelError
    for sizes that do not fit; both say what to change.
    """
    require_supported(config)
    tier = choose_tier(config, options, own=own, capability=limits.compute_capability)
    step = options.sizes(SUITED_SIZES)
    widths, sizes = _buckets(step, settings)
    buffers = BufferPlan(
        config,
        limits,
        BufferSizes(
            rows=max(sizes[-1], widths[-1]),
            slots=step.max_sequences,
            width=widths[-1],
            positions=options.max_sequence_length or config.max_sequence_length,
            kv=_KV_TYPES[tier.kv_dtype],
            scratch=_dequantised(config, tier.precision),
        ),
    )
    stager = Stager(buffers, widths, sizes)
    results = results_region(buffers.sizes.width, stager.prompt_rows)
    layout = Layout()
    reserve_weights(config, layout, tier.precision)
    buffers.reserve(layout)
    for region in (stager.region, results):
        region.reserve(layout)
    reserve_staging(config, layout, tier.precision)
    memory = fit_pages(
        {
            **layout.bytes_by_part(),
            "graphs": graph_bytes(config, widths, sizes),
            "reserve": RESERVE_BYTES,
        },
        buffers.page_bytes(),
        options,
        model_length=config.max_sequence_length,
        budget=replace(budget, bytes=budget.bytes - _gaps(buffers)),
    )
    buffers.reserve_pages(layout, memory.pages)
    pages = {"kv_pages": layout.bytes_by_part()["kv_pages"]}
    memory = replace(memory, bytes_by_purpose=memory.bytes_by_purpose | pages)
    return EnginePlan(config, tier, step, widths, sizes, buffers, stager, results, layout, memory, budget)


def graph_bytes(config: ModelConfig, widths: Sequence[int], sizes: Sequence[int]) -> int:
    """An allowance for the graphs of all buckets, which the driver keeps beside the arena: per prefill size
    one, per width as many as SampleKey tells apart, of which some are captured only when they are needed.
    """
    graphs = _WIDTH_GRAPHS * len(widths) + len(sizes)
    return graphs * (config.n_layers * _LAYER_NODES + _OTHER_NODES) * _NODE_BYTES


def choose_tier(
    config: ModelConfig, options: EngineOptions, *, own: Precision, capability: tuple[int, int]
) -> Tier:
    """The precisions to hold the model in. What was asked for by name is taken or refused; AUTO gives way to
    bf16 where the checkpoint's own cannot be had, and says so. Raises UnsupportedModelError.
    """
    precision = chosen_precision(options.precision, own)
    kv_dtype = chosen_kv_dtype(options.kv_dtype)
    fallbacks = []
    reason = why_not_precision(config, precision, capability)
    if reason is not None:
        if options.precision is not Precision.AUTO:
            raise UnsupportedModelError(f"{config.architecture} cannot run in {precision}: {reason}.")
        fallbacks.append(f"weights are held in bf16, not in the checkpoint's own {precision}: {reason}")
        precision = Precision.BF16
    if precision is Precision.FP8:
        fallbacks.append("the head is kept in bf16 in the fp8 tier")
    reason = why_not_kv_dtype(kv_dtype, capability)
    if reason is not None:
        raise UnsupportedModelError(f"{config.architecture} cannot run so: {reason}.")
    return Tier(precision, kv_dtype, tuple(fallbacks))


def _buckets(step: StepSizes, settings: CudaSettings) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(decode widths, prefill sizes). Raises ModelError for more sequences than a step can hold."""
    if step.max_sequences > MOST_WIDTH:
        raise ModelError(f"max_sequences {step.max_sequences} exceeds the CUDA engine's {MOST_WIDTH}.")
    widths = settings.decode_widths or decode_widths(step.max_sequences)
    return widths, settings.prefill_sizes or prefill_sizes(step.max_step_tokens)


def _gaps(buffers: BufferPlan) -> int:
    """Most bytes that alignment may add behind the scales of FP8 pages; whole pages are aligned anyhow."""
    return 2 * len(buffers.mixers) * ALIGNMENT if buffers.sizes.kv is DType.E4M3 else 0


def _dequantised(config: ModelConfig, precision: Precision) -> int:
    """Elements of the largest q4_0 weight of a layer: many rows take a bf16 copy; the head's do not."""
    weights = device_weights(config, precision)
    layers = (weight for weight in weights if weight.precision is Precision.Q4)
    return max((prod(weight.shape) for weight in layers if weight.name.startswith("layers.")), default=0)
