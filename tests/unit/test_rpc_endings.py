"""How calls end over a scripted pool: with which status, and that all they held is freed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from protos.slipstream.v1 import inference_pb2 as pb
from service.rpc import interception, serving
from service.rpc.errors import RpcError, StatusOnError
from tests.unit.rpc_harness import (
    ScriptedGeneration,
    answers_with,
    error_of,
    generate_request,
    read_stream,
    retry_delay_of,
    rpc_server,
    run,
    violations_of,
)
from worker.client import FinishReason, Rejection, RejectReason

ABORTED = pb.FINISH_REASON_ABORTED
UNSPECIFIED = pb.FINISH_REASON_UNSPECIFIED


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_goes_away_frees_everything_at_once(tiny_checkpoint: Path, is_stream: bool) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            method = harness.inference.Generate if is_stream else harness.inference.Complete
            call = method(generate_request())
            generation = await harness.pool.submitted()
            generation.start()
            if is_stream:
                await call.read()
            assert not generation.closed.is_set()
            call.cancel()
            await generation.closed.wait()
            while harness.serving.requests_open:
                await asyncio.sleep(0.001)

    run(scenario())


def test_a_connection_that_breaks_frees_a_stalled_stream(tiny_checkpoint: Path) -> None:
    """The handler then waits in a write, not for tokens."""

    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            channel = grpc.aio.insecure_channel(
                f"127.0.0.1:{harness.port}", options=[("grpc.use_local_subchannel_pool", 1)]
            )
            stream = channel.unary_stream("/slipstream.v1.Inference/Generate")(
                generate_request().SerializeToString()
            )
            generation = await harness.pool.submitted()
            last_reads, stalled = -1, 0
            while stalled < 50:
                generation.push([60] * 5000)
                await asyncio.sleep(0.001)
                stalled = stalled + 1 if generation.reads == last_reads else 0
                last_reads = generation.reads
            await channel.close()
            await generation.closed.wait()
            del stream

    run(scenario())


def test_the_deadline_goes_to_the_worker_and_ends_the_call(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            call = harness.inference.Generate(generate_request(), timeout=0.3)
            generation = await harness.pool.submitted()
            assert generation.request.time_left_s is not None
            assert 0 < generation.request.time_left_s < 1  # gRPC rounds 0.3 up on the wire
            messages, code, _ = await read_stream(call)
            assert (messages, code) == ([], grpc.StatusCode.DEADLINE_EXCEEDED)
            await generation.closed.wait()
            untimed = harness.inference.Generate(generate_request())
            assert (await harness.pool.submitted(2)).request.time_left_s is None
            untimed.cancel()

    run(scenario())


def test_the_worker_may_see_the_deadline_first(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            call = harness.inference.Generate(generate_request(), timeout=15)
            generation = await harness.pool.submitted()
            generation.push([60])
            generation.end(FinishReason.DEADLINE)
            messages, code, _ = await read_stream(call)
            assert code == grpc.StatusCode.DEADLINE_EXCEEDED
            assert [list(message.token_ids) for message in messages] == [[60]]

    run(scenario())


def test_abort_ends_a_running_call_as_cancelled(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            call = harness.inference.Generate(generate_request(n=2))
            generation = await harness.pool.submitted()
            generation.push([60], 1)
            await call.read()
            reply = await harness.inference.Abort(pb.AbortRequest(request_id="r1"))
            assert reply.found
            messages, code, _ = await read_stream(call)
            assert code == grpc.StatusCode.CANCELLED
            assert [(m.index, m.finish_reason) for m in messages] == [(0, ABORTED), (1, ABORTED)]
            assert [m.usage.completion_tokens for m in messages] == [0, 1]
            again = await harness.inference.Abort(pb.AbortRequest(request_id="r1"))
            assert not again.found

    run(scenario())


def test_abort_before_the_request_comes(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            harness.pool.on_submit = lambda generation: generation.reject(
                Rejection(RejectReason.ABORTED_BEFORE, "aborted before")
            )
            messages, code, _ = await read_stream(harness.inference.Generate(generate_request(n=2)))
            assert code == grpc.StatusCode.CANCELLED
            assert [(m.index, m.finish_reason) for m in messages] == [(0, ABORTED), (1, ABORTED)]
            error = await error_of(harness.inference.Complete(generate_request()))
            assert error.code() == grpc.StatusCode.CANCELLED

    run(scenario())


def test_a_fault_is_internal_with_its_message(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            call = harness.inference.Generate(generate_request(n=2))
            generation = await harness.pool.submitted()
            generation.push([60], 0)
            generation.end(FinishReason.FAULT, 0, "non-finite logits")
            messages, code, details = await read_stream(call)
            assert (code, details) == (grpc.StatusCode.INTERNAL, "non-finite logits")
            assert [list(message.token_ids) for message in messages] == [[60]]
            assert messages[0].finish_reason == UNSPECIFIED
            assert generation.closed.is_set()

    run(scenario())


REJECTIONS = {
    RejectReason.QUEUE_FULL: (grpc.StatusCode.RESOURCE_EXHAUSTED, 2.5),
    RejectReason.DUPLICATE_ID: (grpc.StatusCode.ALREADY_EXISTS, None),
    RejectReason.NO_WORKER: (grpc.StatusCode.UNAVAILABLE, 2.5),
    RejectReason.DRAINING: (grpc.StatusCode.UNAVAILABLE, 2.5),
    RejectReason.TOO_LONG: (grpc.StatusCode.INVALID_ARGUMENT, None),
}


@pytest.mark.parametrize("at_submit", [True, False])
@pytest.mark.parametrize("reason", sorted(REJECTIONS))
def test_rejections_have_their_status(tiny_checkpoint: Path, reason: RejectReason, at_submit: bool) -> None:
    rejection = Rejection(reason, "because", 2.5)

    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            if at_submit:
                harness.pool.refuse = rejection
            else:
                harness.pool.on_submit = lambda generation: generation.reject(rejection)
            error = await error_of(harness.inference.Complete(generate_request()))
            code, delay = REJECTIONS[reason]
            assert (error.code(), retry_delay_of(error)) == (code, delay)
            if reason is RejectReason.TOO_LONG:
                assert violations_of(error) == {"text": "because"}
            assert harness.pool.open_generations == 0

    run(scenario())


def test_loading_and_draining_are_unavailable(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint, is_loaded=False) as harness:
            for call in (
                harness.inference.Complete(generate_request()),
                harness.inference.Tokenize(pb.TokenizeRequest(text="a")),
                harness.inference.GetModelInfo(pb.GetModelInfoRequest()),
            ):
                error = await error_of(call)
                assert error.code() == grpc.StatusCode.UNAVAILABLE
                assert retry_delay_of(error) is not None
        async with rpc_server(tiny_checkpoint) as harness:
            running = harness.inference.Generate(generate_request())
            generation = await harness.pool.submitted()
            harness.serving.start_draining()
            error = await error_of(harness.inference.Complete(generate_request()))
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            await harness.inference.Tokenize(pb.TokenizeRequest(text="a"))
            generation.push([60])
            generation.end(FinishReason.LENGTH)
            _, code, _ = await read_stream(running)
            assert code == grpc.StatusCode.OK

    run(scenario())


def test_a_defect_is_internal_and_logged_not_leaked(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:

            def broken(generation: ScriptedGeneration) -> None:
                raise ZeroDivisionError("secret detail")

            harness.pool.on_submit = broken
            error = await error_of(harness.inference.Complete(generate_request()))
            assert error.code() == grpc.StatusCode.INTERNAL
            assert "secret" not in (error.details() or "")

    run(scenario())
    assert "secret detail" in capsys.readouterr().out


def test_long_prompts_waiting_to_be_read_have_a_limit_together(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MAX_READING_BYTES", 250_000)

    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint, max_length=1_000_000) as harness:
            harness.pool.on_submit = answers_with([60])
            calls = [harness.inference.Complete(generate_request("river " * 16_000)) for _ in range(20)]
            codes = [await call.code() for call in calls]
            assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
            # Short ones need no thread, and later ones find room again.
            await harness.inference.Complete(generate_request())
            await harness.inference.Complete(generate_request("river " * 16_000))

    run(scenario())


def test_large_requests_under_way_have_a_limit_together(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC holds a request's bytes until its call is over, those that mean nothing to us included."""
    monkeypatch.setattr(interception, "MAX_HELD_BYTES", 50_000)
    unknown_field = b"\xa2\x06\xa0\x9c\x01" + b"z" * 20_000  # number 100, of 20,000 bytes
    large = pb.GenerateRequest.FromString(generate_request().SerializeToString() + unknown_field)

    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            calls = []
            for number in (1, 2):  # one after the other: calls may overtake each other
                calls.append(harness.inference.Generate(large))
                generation = await harness.pool.submitted(number)
            error = await error_of(harness.inference.Complete(large))
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "memory" in (error.details() or "")
            assert retry_delay_of(error) is not None
            small = harness.inference.Generate(generate_request())
            await harness.pool.submitted(3)
            for call in (calls[0], small):
                call.cancel()
            while harness.serving.requests_open > 1:
                await asyncio.sleep(0.001)
            again = harness.inference.Generate(large)
            await harness.pool.submitted(4)
            assert not generation.closed.is_set()
            calls[1].cancel()
            again.cancel()

    run(scenario())


def test_a_burst_of_calls_is_answered_not_cancelled(tiny_checkpoint: Path) -> None:
    """More than gRPC lets wait by default, all there before the server's event loop runs."""

    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            await harness.inference.Abort(pb.AbortRequest(request_id="x"))
            calls = [harness.inference.Abort(pb.AbortRequest(request_id=f"r{i}")) for i in range(4_000)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert [answer for answer in answers if isinstance(answer, BaseException)] == []

    run(scenario())


class _GoneClient:
    """The context of a call whose connection is broken and that gRPC has not yet cancelled."""

    async def abort(self, *_: object) -> None:
        raise grpc.aio.InternalError


@pytest.mark.parametrize(
    "error", [grpc.aio.InternalError(), RpcError(grpc.StatusCode.NOT_FOUND, "none")], ids=["write", "status"]
)
def test_writing_to_a_client_that_is_gone_is_no_defect(
    error: Exception, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with (
            StatusOnError(_GoneClient(), "outer"),  # type: ignore[arg-type]
            StatusOnError(_GoneClient(), "inner"),  # type: ignore[arg-type]
        ):
            raise error

    with pytest.raises(asyncio.CancelledError):
        run(scenario())
    output = capfd.readouterr()
    assert "rpc_failed" not in output.out + output.err
