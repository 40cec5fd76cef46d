"""A real gRPC server on a loopback port over a pool that the test plays by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status as RpcStatus
from grpc_health.v1 import health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2_grpc

from protos.slipstream.v1 import control_pb2_grpc, inference_pb2, inference_pb2_grpc
from service.front_instruments import FrontInstruments
from service.rpc.control import MetricsSnapshot, ServerFacts
from service.rpc.server import RpcOptions, RpcServer
from service.rpc.serving import ServedModel, Serving
from service.text import TextTokenizer, load_tokenizer
from worker.client import (
    AnswerFinished,
    AnswerStarted,
    AnswerUpdate,
    EngineCapacity,
    EngineInfo,
    FinishReason,
    GenerationRequest,
    ProfileDone,
    Rejection,
    StageStats,
    TokenLogprobs,
    Update,
    WorkerView,
)

TIMEOUT_S = 20.0
MODEL_NAME = "tiny"
MAX_LENGTH = 256
VOCAB_SIZE = 320

INFO = EngineInfo(
    engine="simulated",
    architecture="llama",
    device="none",
    weight_dtype="f32",
    kv_dtype="f32",
    parameters=1000,
    layers=2,
    hidden_size=64,
    vocab_size=VOCAB_SIZE,
    versions={"numpy": "2"},
)
CAPACITY = EngineCapacity(
    slots=4,
    pages=64,
    max_sequence_length=MAX_LENGTH,
    max_step_tokens=128,
    pipeline_depth=1,
    prefix_cacheable=True,
)

_Result = TypeVar("_Result")


def run(scenario: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs a test's coroutine; one that hangs fails."""
    return asyncio.run(asyncio.wait_for(scenario, TIMEOUT_S))


class ScriptedGeneration:
    """A request as the pool hands it to a servicer; what comes is merged until it is read."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.closed = asyncio.Event()
        self.finished_by_caller: set[int] = set()
        self.reads = 0
        self._pending: dict[int, AnswerUpdate] = {}
        self._prompt_logprobs: list[TokenLogprobs] | None = None
        self._open = set(range(request.n))
        self._rejection: Rejection | None = None
        self._wake = asyncio.Event()

    # ---- the test's side

    def start(self, index: int = 0, cached_tokens: int = 0) -> None:
        self._update(index).started = AnswerStarted(cached_tokens, 0.001)
        self._wake.set()

    def push(self, tokens: Sequence[int], index: int = 0, logprobs: Sequence[TokenLogprobs] = ()) -> None:
        update = self._update(index)
        update.tokens += tokens
        update.logprobs += logprobs
        self._wake.set()

    def end(self, reason: FinishReason, index: int = 0, message: str = "") -> None:
        self._update(index).finished = AnswerFinished(reason, message)
        self._wake.set()

    def push_prompt_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        self._prompt_logprobs = logprobs
        self._wake.set()

    def reject(self, rejection: Rejection) -> None:
        self._rejection = rejection
        self._wake.set()

    def _update(self, index: int) -> AnswerUpdate:
        return self._pending.setdefault(index, AnswerUpdate(index))

    # ---- the servicer's side

    async def next(self) -> Update | None:
        while self._open:
            if self._rejection is not None:
                raise self._rejection
            if self._pending or self._prompt_logprobs is not None:
                self.reads += 1
                answers, self._pending = list(self._pending.values()), {}
                prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
                self._open -= {answer.index for answer in answers if answer.finished is not None}
                return Update(answers, prompt_logprobs)
            self._wake.clear()
            await self._wake.wait()
        return None

    def finish(self, index: int) -> None:
        self.finished_by_caller.add(index)
        self._open.discard(index)
        self._pending.pop(index, None)
        self._wake.set()

    def close(self) -> None:
        self.closed.set()


@dataclass
class ScriptedPool:
    """Hands out ScriptedGenerations and keeps them for the test."""

    on_submit: Callable[[ScriptedGeneration], None] = lambda generation: None
    """Called with each new generation, for tests that answer at once."""
    refuse: Rejection | None = None
    generations: list[ScriptedGeneration] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    views: list[WorkerView] = field(default_factory=list)
    has_room: bool = True
    _submitted: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def submit(self, request: GenerationRequest) -> ScriptedGeneration:
        if self.refuse is not None:
            raise self.refuse
        generation = ScriptedGeneration(request)
        self.generations.append(generation)
        self.on_submit(generation)
        async with self._submitted:
            self._submitted.notify_all()
        return generation

    async def submitted(self, count: int = 1) -> ScriptedGeneration:
        """Waits for the count-th request."""
        async with self._submitted:
            await self._submitted.wait_for(lambda: len(self.generations) >= count)
        return self.generations[count - 1]

    @property
    def open_generations(self) -> int:
        return sum(not generation.closed.is_set() for generation in self.generations)

    async def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        found = False
        for generation in self.generations:
            if generation.request.request_id == request_id and not generation.closed.is_set():
                found = True
                for index in range(generation.request.n):
                    generation.end(FinishReason.ABORTED, index)
        return found

    async def statuses(self, timeout_s: float = 1.0) -> list[WorkerView]:
        return self.views

    async def profile(self, worker: int, steps: int, timeout_s: float) -> ProfileDone:
        if self.refuse is not None:
            raise self.refuse
        return ProfileDone(0, steps, [StageStats("execute", 1.0, 2.0, 3.0, timeout_s)])


class ScriptedControl:
    """The server around the front."""

    def __init__(self) -> None:
        self.drained_with: list[float | None] = []
        self.snapshot = MetricsSnapshot([], "")

    def facts(self) -> ServerFacts:
        return ServerFacts(
            version="1.2.3", uptime_s=5.0, fronts=2, front=1, workers=1, versions={"grpcio": "1"}
        )

    async def metrics(self) -> MetricsSnapshot:
        return self.snapshot

    def drain(self, timeout_s: float | None) -> None:
        self.drained_with.append(timeout_s)


@dataclass
class Harness:
    """A running server and clients for it."""

    server: RpcServer
    serving: Serving
    pool: ScriptedPool
    control: ScriptedControl
    tokenizer: TextTokenizer
    port: int
    channel: grpc.aio.Channel
    inference: inference_pb2_grpc.InferenceStub
    operations: control_pb2_grpc.ControlStub
    health: health_pb2_grpc.HealthStub
    vllm: vllm_engine_pb2_grpc.VllmEngineStub


_tokenizers: dict[Path, TextTokenizer] = {}


@asynccontextmanager
async def rpc_server(
    checkpoint: Path,
    *,
    options: RpcOptions | None = None,
    is_loaded: bool = True,
    channel_options: Sequence[tuple[str, int]] = (),
    max_length: int = MAX_LENGTH,
) -> AsyncIterator[Harness]:
    """A server with one ready worker, unless it `is_loaded` false."""
    tokenizer = _tokenizers.setdefault(checkpoint, load_tokenizer(checkpoint))
    pool, control = ScriptedPool(), ScriptedControl()
    serving = Serving(pool, 1, FrontInstruments())  # type: ignore[arg-type]
    server = RpcServer(serving, control, options or RpcOptions(shares_port=False))
    if is_loaded:
        capacity = EngineCapacity(4, 64, max_length, 128, 1, True)
        serving.model = ServedModel.of(MODEL_NAME, checkpoint, tokenizer, INFO, capacity, 8)
        serving.set_workers([True], True)
    port = await server.start("127.0.0.1:0")
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=list(channel_options)) as channel:
            yield Harness(
                server, serving, pool, control, tokenizer, port, channel,
                inference_pb2_grpc.InferenceStub(channel),
                control_pb2_grpc.ControlStub(channel),
                health_pb2_grpc.HealthStub(channel),
                vllm_engine_pb2_grpc.VllmEngineStub(channel),
            )  # fmt: skip
    finally:
        await server.stop(0)


async def error_of(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    """The error that a unary call ends with; one that succeeds fails the test."""
    try:
        result = await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError(f"succeeded: {result}")


async def read_stream(call: Any) -> tuple[list[Any], grpc.StatusCode, str]:
    """All messages of a stream, its status and the status's message."""
    messages = []
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
    except grpc.aio.AioRpcError as error:
        return messages, error.code(), error.details() or ""
    return messages, await call.code(), await call.details()


def _detail(error: grpc.aio.AioRpcError, kind: Any) -> Any:
    for key, value in error.trailing_metadata():
        if key == "grpc-status-details-bin":
            status = RpcStatus.FromString(value)
            assert status.code == error.code().value[0]
            for packed in status.details:
                message = kind()
                if packed.Unpack(message):
                    return message
    return None


def violations_of(error: grpc.aio.AioRpcError) -> dict[str, str]:
    """Descriptions by field, out of the error's BadRequest."""
    detail = _detail(error, BadRequest)
    return {entry.field: entry.description for entry in detail.field_violations} if detail else {}


def retry_delay_of(error: grpc.aio.AioRpcError) -> float | None:
    detail = _detail(error, RetryInfo)
    return detail.retry_delay.ToMicroseconds() / 1e6 if detail else None


def generate_request(text: str = "hello", **sampling: object) -> inference_pb2.GenerateRequest:
    result = inference_pb2.GenerateRequest(text=text, request_id="r1")
    for name, value in sampling.items():
        if isinstance(value, list):
            getattr(result.sampling, name).extend(value)
        else:
            setattr(result.sampling, name, value)
    return result


def answers_with(
    tokens: list[int], reason: FinishReason = FinishReason.LENGTH
) -> Callable[[ScriptedGeneration], None]:
    """A script that gives all answers these tokens at once."""

    def script(generation: ScriptedGeneration) -> None:
        for index in range(generation.request.n):
            generation.start(index)
            generation.push(tokens, index)
            generation.end(reason, index)

    return script


def piece(tokenizer: TextTokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)
