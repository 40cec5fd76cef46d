"""All that the service may know of workers: the only module of `worker` that `service` imports.

A front submits through a WorkerPool; the main process runs workers through a WorkerSupervisor, and passes
`supervisor.authkey` and every change of `supervisor.reports()` (picklable) on to the fronts' pools.
Importing this loads no engine and no kernel.
"""

from __future__ import annotations

from engine.config.generation import GenerationDefaults, read_eos_token_ids, read_generation_defaults
from engine.errors import CheckpointError, ConfigError, KernelToolsError, ModelError, UnsupportedModelError
from engine.files.gguf_head import read_gguf_metadata
from engine.files.gguf_names import gguf_part_names
from engine.files.json_file import read_json_object, read_optional_json_object
from engine.interface import (
    MAX_LOGPROBS,
    PAGE_SIZE,
    EngineCapacity,
    EngineInfo,
    IntArray,
    Sampling,
    TokenLogprobs,
)
from engine.options import EngineOptions, KvDtype, Precision
from worker.generation import (
    AnswerFinished,
    AnswerStarted,
    AnswerUpdate,
    Generation,
    GenerationRequest,
    Rejection,
    Update,
)
from worker.inspection import (
    DeviceFigures,
    Outlook,
    PlanReport,
    ProductFigure,
    gpu_figures,
    inspect_model,
    list_products,
    measure_products,
    plan_model,
    plan_outlooks,
    stated_figures,
)
from worker.instruments import METRICS_PREFIX
from worker.kernel_tools import (
    KernelBuild,
    KernelEntry,
    all_architectures,
    build_kernels,
    default_architectures,
    kernel_cache_folder,
    list_kernels,
)
from worker.messages import (
    FinishReason,
    HistogramData,
    MetricData,
    ProfileDone,
    RejectReason,
    StageStats,
    Status,
)
from worker.metrics import (
    DURATION_BOUNDS_S,
    LATENCY_BOUNDS_S,
    SIZE_BOUNDS,
    Counter,
    Gauge,
    Histogram,
    MetricsRegistry,
    merge_metrics,
)
from worker.options import PoolOptions, RestartPolicy, WorkerOptions
from worker.pool import WorkerPool
from worker.reports import WorkerDeath, WorkerReport, WorkerState
from worker.roster import WorkerView
from worker.scheduling.options import SchedulerOptions
from worker.spawning import exit_with_parent, spawn_process
from worker.supervisor import WorkerFailed, WorkerSupervisor

__all__ = [
    "DURATION_BOUNDS_S",
    "LATENCY_BOUNDS_S",
    "MAX_LOGPROBS",
    "METRICS_PREFIX",
    "PAGE_SIZE",
    "SIZE_BOUNDS",
    "AnswerFinished",
    "AnswerStarted",
    "AnswerUpdate",
    "CheckpointError",
    "ConfigError",
    "Counter",
    "DeviceFigures",
    "EngineCapacity",
    "EngineInfo",
    "EngineOptions",
    "FinishReason",
    "Gauge",
    "Generation",
    "GenerationDefaults",
    "GenerationRequest",
    "Histogram",
    "HistogramData",
    "IntArray",
    "KernelBuild",
    "KernelEntry",
    "KernelToolsError",
    "KvDtype",
    "MetricData",
    "MetricsRegistry",
    "ModelError",
    "Outlook",
    "PlanReport",
    "PoolOptions",
    "Precision",
    "ProductFigure",
    "ProfileDone",
    "RejectReason",
    "Rejection",
    "RestartPolicy",
    "Sampling",
    "SchedulerOptions",
    "StageStats",
    "Status",
    "TokenLogprobs",
    "UnsupportedModelError",
    "Update",
    "WorkerDeath",
    "WorkerFailed",
    "WorkerOptions",
    "WorkerPool",
    "WorkerReport",
    "WorkerState",
    "WorkerSupervisor",
    "WorkerView",
    "all_architectures",
    "build_kernels",
    "default_architectures",
    "exit_with_parent",
    "gguf_part_names",
    "gpu_figures",
    "inspect_model",
    "kernel_cache_folder",
    "list_kernels",
    "list_products",
    "measure_products",
    "merge_metrics",
    "plan_model",
    "plan_outlooks",
    "read_eos_token_ids",
    "read_generation_defaults",
    "read_gguf_metadata",
    "read_json_object",
    "read_optional_json_object",
    "spawn_process",
    "stated_figures",
]
