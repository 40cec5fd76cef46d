import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_STATE_UNSPECIFIED: _ClassVar[ServerState]
    SERVER_STATE_LOADING: _ClassVar[ServerState]
    SERVER_STATE_SERVING: _ClassVar[ServerState]
    SERVER_STATE_DEGRADED: _ClassVar[ServerState]
    SERVER_STATE_DRAINING: _ClassVar[ServerState]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_LOADING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_RESTARTING: _ClassVar[WorkerState]
    WORKER_STATE_FAILED: _ClassVar[WorkerState]
SERVER_STATE_UNSPECIFIED: ServerState
SERVER_STATE_LOADING: ServerState
SERVER_STATE_SERVING: ServerState
SERVER_STATE_DEGRADED: ServerState
SERVER_STATE_DRAINING: ServerState
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_LOADING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_RESTARTING: WorkerState
WORKER_STATE_FAILED: WorkerState

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("state", "version", "uptime_seconds", "fronts", "front", "open_streams", "workers", "versions")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FRONTS_FIELD_NUMBER: _ClassVar[int]
    FRONT_FIELD_NUMBER: _ClassVar[int]
    OPEN_STREAMS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    state: ServerState
    version: str
    uptime_seconds: float
    fronts: int
    front: int
    open_streams: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    versions: _containers.ScalarMap[str, str]
    def __init__(self, state: _Optional[_Union[ServerState, str]] = ..., version: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., fronts: _Optional[int] = ..., front: _Optional[int] = ..., open_streams: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., versions: _Optional[_Mapping[str, str]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("index", "pid", "state", "restarts", "load_stage", "load_progress", "last_error", "engine", "device", "running", "waiting", "paused", "slots", "pages", "pages_free", "pages_cached", "steps", "preemptions", "memory_plan", "fallbacks", "weight_dtype", "kv_dtype")
    class MemoryPlanEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_STAGE_FIELD_NUMBER: _ClassVar[int]
    LOAD_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PLAN_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    index: int
    pid: int
    state: WorkerState
    restarts: int
    load_stage: str
    load_progress: float
    last_error: str
    engine: str
    device: str
    running: int
    waiting: int
    paused: int
    slots: int
    pages: int
    pages_free: int
    pages_cached: int
    steps: int
    preemptions: int
    memory_plan: _containers.ScalarMap[str, int]
    fallbacks: _containers.RepeatedScalarFieldContainer[str]
    weight_dtype: str
    kv_dtype: str
    def __init__(self, index: _Optional[int] = ..., pid: _Optional[int] = ..., state: _Optional[_Union[WorkerState, str]] = ..., restarts: _Optional[int] = ..., load_stage: _Optional[str] = ..., load_progress: _Optional[float] = ..., last_error: _Optional[str] = ..., engine: _Optional[str] = ..., device: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., paused: _Optional[int] = ..., slots: _Optional[int] = ..., pages: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_cached: _Optional[int] = ..., steps: _Optional[int] = ..., preemptions: _Optional[int] = ..., memory_plan: _Optional[_Mapping[str, int]] = ..., fallbacks: _Optional[_Iterable[str]] = ..., weight_dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ("metrics", "prometheus_text")
    METRICS_FIELD_NUMBER: _ClassVar[int]
    PROMETHEUS_TEXT_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.RepeatedCompositeFieldContainer[Metric]
    prometheus_text: str
    def __init__(self, metrics: _Optional[_Iterable[_Union[Metric, _Mapping]]] = ..., prometheus_text: _Optional[str] = ...) -> None: ...

class Metric(_message.Message):
    __slots__ = ("name", "help", "kind", "labels", "value", "histogram")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Metric.Kind]
        KIND_COUNTER: _ClassVar[Metric.Kind]
        KIND_GAUGE: _ClassVar[Metric.Kind]
        KIND_HISTOGRAM: _ClassVar[Metric.Kind]
    KIND_UNSPECIFIED: Metric.Kind
    KIND_COUNTER: Metric.Kind
    KIND_GAUGE: Metric.Kind
    KIND_HISTOGRAM: Metric.Kind
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    HELP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    name: str
    help: str
    kind: Metric.Kind
    labels: _containers.ScalarMap[str, str]
    value: float
    histogram: Histogram
    def __init__(self, name: _Optional[str] = ..., help: _Optional[str] = ..., kind: _Optional[_Union[Metric.Kind, str]] = ..., labels: _Optional[_Mapping[str, str]] = ..., value: _Optional[float] = ..., histogram: _Optional[_Union[Histogram, _Mapping]] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("bounds", "counts", "sum")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout",)
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    timeout: _duration_pb2.Duration
    def __init__(self, timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("remaining",)
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    remaining: int
    def __init__(self, remaining: _Optional[int] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("steps", "worker", "timeout")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    steps: int
    worker: int
    timeout: _duration_pb2.Duration
    def __init__(self, steps: _Optional[int] = ..., worker: _Optional[int] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("steps", "stages")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    steps: int
    stages: _containers.RepeatedCompositeFieldContainer[StageTiming]
    def __init__(self, steps: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[StageTiming, _Mapping]]] = ...) -> None: ...

class StageTiming(_message.Message):
    __slots__ = ("stage", "mean", "median", "p99", "total")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_FIELD_NUMBER: _ClassVar[int]
    P99_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    stage: str
    mean: float
    median: float
    p99: float
    total: float
    def __init__(self, stage: _Optional[str] = ..., mean: _Optional[float] = ..., median: _Optional[float] = ..., p99: _Optional[float] = ..., total: _Optional[float] = ...) -> None: ...
