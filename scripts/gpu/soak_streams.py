"""Carries out one call of a soak and says whether what came is that subject's own answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from protos.slipstream.v1.inference_pb2 import AbortRequest, FinishReason, GenerateRequest, TokenIds
from protos.slipstream.v1.sampling_pb2 import SamplingParams
from scripts.gpu.soak_requests import Call, Ending, Subject
from service.cli.connection import Connection, inference

if TYPE_CHECKING:
    from protos.slipstream.v1.inference_pb2_grpc import InferenceStub

PATIENCE_S = 300.0
"""No call may take longer; one that does is a hanging stream."""

EXPECTED = {
    Ending.WHOLE: {grpc.StatusCode.OK},
    Ending.CANCELLED: {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED},
    Ending.ABORTED: {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED},
    Ending.DEADLINE: {grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED},
    Ending.CUT: {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE},
}
"""A call may be over before its end is brought about."""


@dataclass(slots=True)
class Received:
    """What a client saw of one call."""

    status: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of the tokens, where they were asked for."""
    finish: int = 0
    usage: int = 0
    request_ids: set[str] = field(default_factory=set)


class Wire:
    """A TCP connection to the server that can be torn: bytes pass both ways until cut() resets both ends."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: set[asyncio.Task[None]] = set()
        self.target = ""

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.target = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        far_reader, far_writer = await asyncio.open_connection(self._host.strip("[]"), int(self._port))
        self._writers.append(far_writer)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        except OSError:  # torn, as was wanted
            return


async def ask_alone(stub: InferenceStub, connection: Connection, subject: Subject, request_id: str) -> None:
    """Fills in the subject's answer. Raises grpc.RpcError."""
    received = Received()
    async for message in stub.Generate(
        subject.request(request_id), metadata=connection.metadata(), timeout=PATIENCE_S
    ):
        _take(received, message)
    subject.answer = received.tokens


async def carry_out(stub: InferenceStub, connection: Connection, call: Call, request_id: str) -> Received:
    """Runs the call to its end. Never raises for a call that fails: its status tells."""
    async with AsyncExitStack() as stack:
        wire = None
        if call.ending is Ending.CUT:
            wire = await stack.enter_async_context(Wire(connection.target))
            own = Connection(target=wire.target, token=connection.token)
            stub = inference(await stack.enter_async_context(own.open_async()))
        stream = stub.Generate(
            call.subject.request(request_id, call.priority),
            metadata=connection.metadata(),
            timeout=call.deadline_s if call.ending is Ending.DEADLINE else PATIENCE_S,
        )
        received = Received()
        helpers: list[asyncio.Task[Any]] = []
        try:
            if call.after_messages == 0:
                await _bring_about(stub, connection, call, request_id, stream, wire, helpers)
            seen = 0
            async for message in stream:
                _take(received, message)
                seen += 1
                if seen == call.after_messages:
                    await _bring_about(stub, connection, call, request_id, stream, wire, helpers)
        except asyncio.CancelledError:  # the stream's own, by stream.cancel()
            if not stream.cancelled():
                raise
            received.status = grpc.StatusCode.CANCELLED
        except grpc.RpcError as error:
            received.status, received.details = error.code(), error.details() or ""
        for helper in helpers:
            await helper
        return received


async def _bring_about(
    stub: InferenceStub,
    connection: Connection,
    call: Call,
    request_id: str,
    stream: Any,
    wire: Wire | None,
    helpers: list[asyncio.Task[Any]],
) -> None:
    if call.ending is Ending.CANCELLED:
        stream.cancel()
    elif call.ending is Ending.ABORTED:
        abort = stub.Abort(AbortRequest(request_id=request_id), metadata=connection.metadata())
        helpers.append(asyncio.ensure_future(_finish(abort)))
    elif wire is not None:
        wire.cut()


async def _finish(call: Any) -> Any:
    return await call


def _take(received: Received, message: Any) -> None:
    received.tokens.extend(message.token_ids)
    received.logprobs.extend(entry.token.logprob for entry in message.logprobs)
    received.finish = message.finish_reason or received.finish
    received.usage = message.usage.completion_tokens
    received.request_ids.add(message.request_id)


def find_fault(call: Call, request_id: str, received: Received) -> str | None:
    """What is wrong with the call besides its tokens; None if nothing is."""
    if received.status not in EXPECTED[call.ending]:
        return f"{call.ending} ended with {received.status.name}: {received.details[:200]}"
    if received.request_ids - {request_id}:
        return f"messages of another request came: {received.request_ids}"
    sampling = call.subject.sampling
    if received.tokens and sampling.HasField("logprobs") and len(received.logprobs) != len(received.tokens):
        return f"{len(received.logprobs)} log-probabilities for {len(received.tokens)} tokens"
    if received.status is not grpc.StatusCode.OK:
        return None
    if received.usage != len(received.tokens):
        return f"usage says {received.usage} tokens, {len(received.tokens)} came"
    if received.finish == FinishReason.FINISH_REASON_LENGTH:
        return None if len(received.tokens) == sampling.max_tokens else "ended by length before max_tokens"
    if received.finish == FinishReason.FINISH_REASON_STOP and not sampling.ignore_eos:
        return None
    return f"OK with finish reason {FinishReason.Name(received.finish)}"


def follows(call: Call, received: Received) -> bool:
    """Whether the tokens are those of the subject's own answer, or as many of them as came."""
    answer = call.subject.answer
    if received.status is grpc.StatusCode.OK:
        return received.tokens == answer
    return received.tokens == answer[: len(received.tokens)]


@dataclass(slots=True)
class Widest:
    """How far decoded tokens lay from what forced decoding gives: rounding, as long as it is little."""

    greedy: float = 0.0
    """Nats below the likeliest."""
    drawn: float = 0.0
    """Nats below the least likely of the top_k it was drawn from."""
    logprob: float = 0.0
    """Between a log-probability told while decoding and the forced one of the same token."""
    squares: float = 0.0
    """Sum of the last one's squares, over `logprobs` tokens."""
    logprobs: int = 0

    def add_logprob(self, difference: float) -> None:
        self.logprob = max(self.logprob, abs(difference))
        self.squares += difference * difference
        self.logprobs += 1

    def as_json(self) -> dict[str, float]:
        rms = (self.squares / self.logprobs) ** 0.5 if self.logprobs else 0.0
        return {
            "greedy": round(self.greedy, 4),
            "drawn": round(self.drawn, 4),
            "logprob": round(self.logprob, 4),
            "logprob_rms": round(rms, 5),
            "logprobs": self.logprobs,
        }


async def why_wrong(
    stub: InferenceStub,
    connection: Connection,
    subject: Subject,
    received: Received,
    noise: float,
    widest: Widest,
) -> str | None:
    """Forced decoding of an answer that differs from the one given alone; None if each of its tokens could
    have been chosen there and had the log-probability that was told with it, both but for `noise` (nats).

    A greedy token must be the likeliest; a drawn one no less likely than the last of those it was drawn from,
    whose set rounding may change: a rank says nothing, since any number of tokens may be next to equal.
    """
    forced = await _forced(stub, connection, subject, received.tokens)
    seen = Counter[int]()
    told = received.logprobs or [None] * len(received.tokens)
    for index, (token, entry, logprob) in enumerate(zip(received.tokens, forced, told, strict=True)):
        behind = entry.top[subject.top_k - 1].logprob - entry.token.logprob - subject.allowance(seen)
        if subject.top_k == 1:
            widest.greedy = max(widest.greedy, behind)
        else:
            widest.drawn = max(widest.drawn, behind)
        if behind > noise:
            return (
                f"token {index} ({token}), rank {entry.rank}, is {behind:.3f} nats less likely than the last "
                f"of the {subject.top_k} it was chosen from"
            )
        if logprob is not None:
            widest.add_logprob(logprob - entry.token.logprob)
            if abs(logprob - entry.token.logprob) > noise:
                return f"token {index} ({token}) was told {logprob:.3f}, forced {entry.token.logprob:.3f}"
        seen[token] += 1
    return None


async def _forced(
    stub: InferenceStub, connection: Connection, subject: Subject, tokens: list[int]
) -> list[Any]:
    """The prompt log-probabilities of an answer's tokens, with as many alternatives as it chose from."""
    request = GenerateRequest(
        tokens=TokenIds(ids=[*subject.prompt, *tokens]),
        sampling=SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=subject.top_k),
    )
    answer = await stub.Complete(request, metadata=connection.metadata(), timeout=PATIENCE_S)
    return list(answer.prompt_logprobs[len(subject.prompt) - 1 :])
