"""What fronts and workers say to each other. Plain data, pickled; the only shared vocabulary.

A front numbers its sequences with *keys*, unique within that front for as long as it lives. A request
with n answers takes n consecutive keys: answer i is key + i.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from engine.interface import EngineCapacity, EngineInfo, IntArray, Sampling, TokenLogprobs


class FinishReason(IntEnum):
    """Why a sequence ended, as the worker sees it. Stop strings are the front's to find."""

    STOP_TOKEN = 1
    """The last token is one of sampling.stop_token_ids."""
    LENGTH = 2
    ABORTED = 3
    """By request id."""
    CANCELLED = 4
    """By key: the front wanted no more."""
    DEADLINE = 5
    FAULT = 6
    """The engine failed on this request alone; or it brought a worker down twice."""


class RejectReason(IntEnum):
    """Why a request was not admitted."""

    QUEUE_FULL = 1
    DUPLICATE_ID = 2
    ABORTED_BEFORE = 3
    """Its id was aborted before it came."""
    DRAINING = 4
    TOO_LONG = 5
    """Could never fit, even alone."""
    NO_WORKER = 6


def answer_seed(seed: int, answer: int) -> int:
    """The seed with which answer `answer` of a request runs: seed + answer, mod 2⁶⁴."""
    return (seed + answer) % 2**64


# ---- front → worker


@dataclass(frozen=True, slots=True)
class Submit:
    """One request."""

    key: int
    request_id: str
    prompt: IntArray
    """int32 [n_prompt], n_prompt ≥ 1."""
    sampling: Sampling
    """Of answer 0; the seeds of others are answer_seed()'s."""
    max_tokens: int
    """≥ 1; prompt + max_tokens fit max_sequence_length."""
    n: int = 1
    priority: int = 0
    """Higher first."""
    cache_salt: str = ""
    time_left_s: float | None = None
    """Until the deadline, at sending."""
    output: IntArray | None = None
    """Tokens already delivered (resubmission after a worker's death), int32; only with n == 1. max_tokens
    and min_tokens still count from the beginning."""
    is_resubmission: bool = False
    """Admitted whatever the queue's length: the client already has part of the answer."""
    is_suspect: bool = False
    """Was running when a worker died: such requests start one at a time, each announced by TrialStarted."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """The front wants no more of these sequences; no message about them follows."""

    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request by id, whichever front it came from; remembered for a while if unknown.

    Answered by AbortDone.
    """

    request_id: str
    ticket: int


@dataclass(frozen=True, slots=True)
class SetPaused:
    """Halt or resume a sequence whose client does not read. A paused one holds no slot and no page."""

    key: int
    paused: bool


@dataclass(frozen=True, slots=True)
class ProfileStart:
    """Measure the next steps; answered by ProfileDone."""

    ticket: int
    steps: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Ping:
    """Answered by Status at once, even when idle."""

    ticket: int


# ---- worker → front


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on a connection: the worker is loaded and takes requests."""

    worker: int
    generation: int
    """Counts the starts of this worker, from 0."""
    pid: int
    info: EngineInfo
    capacity: EngineCapacity


@dataclass(frozen=True, slots=True)
class TrialStarted:
    """A suspect's turn has come: sent before the first step that works on it."""

    key: int


@dataclass(frozen=True, slots=True)
class Started:
    """A sequence was admitted and its first chunk is in a step."""

    key: int
    cached_tokens: int
    queue_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence is over. Sent with (after) its last tokens."""

    key: int
    reason: FinishReason
    message: str = ""
    """For FAULT: what happened."""
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class StepTokens:
    """All that one step (or several, if the front was slow to read) has for one front.

    `keys`, `counts` run in parallel: the next counts[i] entries of `tokens` are keys[i]'s new tokens.
    A stop token that ended a sequence is among them.
    """

    keys: list[int]
    counts: list[int]
    tokens: list[int]
    started: list[Started] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By key, one per new token, where asked for."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By key, whole: for prompt tokens 1 … n−1; of answer 0 only."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A request was not admitted; nothing else follows for its keys."""

    key: int
    reason: RejectReason
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class AbortDone:
    """The answer to Abort."""

    ticket: int
    found: bool
    """Whether this worker had the request, queued or running."""


@dataclass(frozen=True, slots=True)
class StageStats:
    """Microseconds."""

    stage: str
    mean: float
    median: float
    p99: float
    total: float


@dataclass(frozen=True, slots=True)
class ProfileDone:
    """The answer to ProfileStart."""

    ticket: int
    steps: int
    """Measured; fewer than asked for if time ran out."""
    stages: list[StageStats]


@dataclass(frozen=True, slots=True)
class HistogramData:
    """Counts per bucket (not cumulative); bounds are upper bounds, the last +inf."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class MetricData:
    """One time series at one moment. Those of equal name and labels, from any process, add up."""

    name: str
    """As in Prometheus, without the `_total` of counters."""
    kind: str
    """"counter", "gauge" or "histogram"."""
    help: str
    labels: tuple[tuple[str, str], ...] = ()
    value: float = 0.0
    histogram: HistogramData | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """A worker's state of affairs: sent on Ping, and to every front about once a second while busy."""

    ticket: int | None
    running: int
    waiting: int
    paused: int
    slots: int
    pages: int
    pages_free: int
    pages_cached: int
    steps: int
    preemptions: int
    is_draining: bool
    metrics: list[MetricData]
    has_room: bool = True
    """Whether a request that came now would be queued rather than rejected."""


FrontToWorker = Submit | Cancel | Abort | SetPaused | ProfileStart | Ping
WorkerToFront = Hello | TrialStarted | StepTokens | Rejected | AbortDone | ProfileDone | Status
