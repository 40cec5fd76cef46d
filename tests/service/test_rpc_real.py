"""The RPC contract over real processes: fronts, a worker, the simulated engine, real connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from protos.slipstream.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc
from protos.slipstream.v1 import inference_pb2 as pb
from protos.slipstream.v1.sampling_pb2 import SamplingParams
from tests.service.server_process import ServerProcess, inference, running_server, wait_until

TIMEOUT_S = 30.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ABORTED = pb.FINISH_REASON_ABORTED


def long_request(request_id: str = "", **sampling: object) -> pb.GenerateRequest:
    """Runs until it is ended."""
    params = SamplingParams(ignore_eos=True, **({"max_tokens": 2000} | sampling))
    return pb.GenerateRequest(request_id=request_id, text="hello", sampling=params)


def short_request(**sampling: object) -> pb.GenerateRequest:
    params = SamplingParams(ignore_eos=True, **({"max_tokens": 3} | sampling))
    return pb.GenerateRequest(text="hello", sampling=params)


def running(server: ServerProcess) -> tuple[int, int]:
    """Sequences at work and waiting, of all workers."""
    workers = server.status().workers
    return sum(worker.running for worker in workers), sum(worker.waiting for worker in workers)


def wait_idle(server: ServerProcess) -> None:
    wait_until(lambda: running(server) == (0, 0), "nothing runs")


def test_usage_is_right_in_every_message(server: ServerProcess) -> None:
    request = short_request(max_tokens=40, n=3, seed=1)
    request.tokens.ids.extend([7, 8, 9] * 50)
    with inference(server) as stub:
        for is_repeated in (False, True):
            counts = {0: 0, 1: 0, 2: 0}
            finished = set()
            for message in stub.Generate(request, timeout=TIMEOUT_S):
                counts[message.index] += len(message.token_ids)
                assert message.usage.prompt_tokens == 150
                assert message.usage.completion_tokens == counts[message.index]
                assert message.index not in finished
                if is_repeated:
                    assert message.usage.cached_tokens == 128
                if message.finish_reason:
                    finished.add(message.index)
                    assert message.finish_reason == pb.FINISH_REASON_LENGTH
                    assert 0 < message.timings.first_token <= message.timings.total
            assert counts == {0: 40, 1: 40, 2: 40}
            assert finished == {0, 1, 2}


def test_complete_and_generate_agree(server: ServerProcess) -> None:
    request = short_request(max_tokens=60, seed=5, temperature=1.0, stop=["e", "zz"], logprobs=2, echo=True)
    with inference(server) as stub:
        whole = stub.Complete(request, timeout=TIMEOUT_S)
        messages = list(stub.Generate(request, timeout=TIMEOUT_S))
    completion = whole.completions[0]
    assert "".join(message.text for message in messages) == completion.text
    assert [token for message in messages for token in message.token_ids] == list(completion.token_ids)
    assert [entry for message in messages for entry in message.logprobs] == list(completion.logprobs)
    assert messages[-1].finish_reason == completion.finish_reason
    assert messages[-1].usage.completion_tokens == whole.usage.completion_tokens == len(completion.logprobs)
    assert completion.text.startswith("hello")


def test_a_client_that_goes_away_frees_its_slots(server: ServerProcess) -> None:
    with inference(server) as stub:
        calls = [stub.Generate(long_request(n=2)) for _ in range(4)]
        for call in calls:
            next(call)
        assert sum(running(server)) == 8
        for call in calls:
            call.cancel()
        wait_idle(server)


def test_a_deadline_ends_the_stream_and_frees_its_slot(server: ServerProcess) -> None:
    with inference(server) as stub:
        call = stub.Generate(long_request(), timeout=0.5)
        next(call)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        wait_idle(server)


def test_abort_reaches_requests_of_any_front(server: ServerProcess) -> None:
    """Each connection lands on a front of the kernel's choice."""
    for i in range(6):
        with inference(server) as stub, inference(server) as other:
            call = stub.Generate(long_request(f"abort-{i}"), timeout=TIMEOUT_S)
            next(call)
            assert other.Abort(pb.AbortRequest(request_id=f"abort-{i}"), timeout=TIMEOUT_S).found
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() == grpc.StatusCode.CANCELLED
            assert not other.Abort(pb.AbortRequest(request_id=f"abort-{i}"), timeout=TIMEOUT_S).found
    wait_idle(server)


def test_an_id_aborted_first_is_remembered(server: ServerProcess) -> None:
    with inference(server) as stub, inference(server) as other:
        assert not stub.Abort(pb.AbortRequest(request_id="early"), timeout=TIMEOUT_S).found
        call = other.Generate(long_request("early"), timeout=TIMEOUT_S)
        assert next(call).finish_reason == ABORTED
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert caught.value.code() == grpc.StatusCode.CANCELLED


def test_an_id_in_flight_already_exists_on_every_front(server: ServerProcess) -> None:
    with inference(server) as stub:
        call = stub.Generate(long_request("twice"), timeout=TIMEOUT_S)
        next(call)
        for _ in range(4):
            with inference(server) as other, pytest.raises(grpc.RpcError) as caught:
                other.Complete(long_request("twice"), timeout=TIMEOUT_S)
            assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
        next(call)
        call.cancel()
    wait_idle(server)


def test_profile_measures_steps(server: ServerProcess) -> None:
    with inference(server) as stub, server.channel() as channel:
        call = stub.Generate(long_request(), timeout=TIMEOUT_S)
        next(call)
        control = control_pb2_grpc.ControlStub(channel)
        reply = control.Profile(control_pb2.ProfileRequest(steps=20), timeout=TIMEOUT_S)
        assert reply.steps == 20
        assert {"schedule", "execute", "send"} <= {stage.stage for stage in reply.stages}
        call.cancel()
    wait_idle(server)


def test_the_gateways_protocol(server: ServerProcess) -> None:
    own = short_request(max_tokens=30, seed=3, temperature=1.0)
    own.tokens.ids.extend([5, 6, 7])
    request = vllm_engine_pb2.GenerateRequest(
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[5, 6, 7]),
        sampling_params=vllm_engine_pb2.SamplingParams(
            temperature=1.0, max_tokens=30, seed=3, ignore_eos=True
        ),
        stream=True,
    )
    with inference(server) as stub, server.channel() as channel:
        expected = list(stub.Complete(own, timeout=TIMEOUT_S).completions[0].token_ids)
        gateway = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        assert gateway.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), timeout=TIMEOUT_S).healthy
        messages = list(gateway.Generate(request, timeout=TIMEOUT_S))
        chunks = [message.chunk for message in messages if message.HasField("chunk")]
        assert [token for chunk in chunks for token in chunk.token_ids] == expected
        assert messages[-1].complete.finish_reason == "length"
        request.stream = False
        (message,) = gateway.Generate(request, timeout=TIMEOUT_S)
        assert list(message.complete.output_ids) == expected


def test_hundreds_of_calls_that_end_in_every_way_leave_nothing_behind(server: ServerProcess) -> None:
    """Each stream is checked against its own prompt and seed; then every slot and page is free again."""
    dice = random.Random(3)

    async def whole(stub: inference_pb2_grpc.InferenceStub, number: int) -> None:
        request = short_request(max_tokens=20, seed=number, temperature=1.0)
        request.tokens.ids.extend([number % 300, 5, 6])
        first, second = await asyncio.gather(stub.Complete(request), stub.Complete(request))
        assert first.completions[0].token_ids == second.completions[0].token_ids
        assert len(first.completions[0].token_ids) == 20

    async def leaves(stub: inference_pb2_grpc.InferenceStub, number: int) -> None:
        call = stub.Generate(long_request(n=1 + number % 3))
        for _ in range(number % 4):
            await call.read()
        call.cancel()

    async def is_late(stub: inference_pb2_grpc.InferenceStub, number: int) -> None:
        call = stub.Complete(long_request(), timeout=0.001 * (number % 50))
        assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED

    async def is_aborted(stub: inference_pb2_grpc.InferenceStub, number: int) -> None:
        call = stub.Generate(long_request(f"chaos-{number}"))
        if number % 2:
            await call.read()
        await stub.Abort(pb.AbortRequest(request_id=f"chaos-{number}"))
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        assert await call.code() == grpc.StatusCode.CANCELLED

    async def is_refused(stub: inference_pb2_grpc.InferenceStub, number: int) -> None:
        assert await stub.Complete(short_request(n=0)).code() == grpc.StatusCode.INVALID_ARGUMENT

    async def client(numbers: list[int]) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(server.target, options) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            for number in numbers:
                ways = (whole, leaves, is_late, is_aborted, is_refused)
                await asyncio.wait_for(dice.choice(ways)(stub, number), TIMEOUT_S)

    async def all_clients() -> None:
        await asyncio.gather(*(client(list(range(i, 360, 12))) for i in range(12)))

    wait_idle(server)
    before = server.status().workers[0]
    asyncio.run(all_clients())
    wait_idle(server)
    after = server.status().workers[0]
    assert after.pid == before.pid
    assert after.pages_free + after.pages_cached == after.pages
    assert after.paused == 0


@pytest.fixture(scope="module")
def small_server(tiny_checkpoint: Path) -> Iterator[ServerProcess]:
    """One slot and one place in the queue. A long answer takes a second, so that a busy machine has the time
    to halt it before it is whole."""
    flags = ("--engine", "simulated", "--simulated-step-us", "500", "--max-sequences=1", "--max-queued=1")
    with running_server(tiny_checkpoint, *flags) as running:
        yield running


# Receive windows that do not grow, so that a client that does not read is noticed after 64 KB.
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]


def test_a_client_that_never_reads_is_halted_and_slows_nobody(small_server: ServerProcess) -> None:
    with grpc.insecure_channel(small_server.target, SMALL_WINDOW) as channel, inference(small_server) as stub:
        method = channel.unary_stream("/slipstream.v1.Inference/Generate")
        # Log-probabilities make half a kilobyte of each token: more than the window takes.
        call = method(long_request(logprobs=20).SerializeToString(), timeout=TIMEOUT_S)
        wait_until(lambda: small_server.status().workers[0].paused == 1, "the stream is halted")
        # The only slot is free for others.
        for _ in range(3):
            reply = stub.Complete(short_request(), timeout=TIMEOUT_S)
            assert len(reply.completions[0].token_ids) == 3
        assert small_server.status().workers[0].paused == 1
        # Read at last, the stream is whole.
        messages = [pb.GenerateResponse.FromString(data) for data in call]
        assert sum(len(message.token_ids) for message in messages) == 2000
        assert messages[-1].finish_reason == pb.FINISH_REASON_LENGTH
    wait_idle(small_server)


def test_a_full_queue_is_refused_with_a_delay_while_health_answers(small_server: ServerProcess) -> None:
    with (
        grpc.insecure_channel(small_server.target, SMALL_WINDOW) as channel,
        inference(small_server) as stub,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        ready = health_pb2.HealthCheckRequest(service="readiness")
        blocker = stub.Generate(long_request(n=100), timeout=TIMEOUT_S)
        wait_until(lambda: running(small_server)[1] >= 1, "the queue is full")
        with pytest.raises(grpc.RpcError) as caught:
            stub.Complete(short_request(), timeout=TIMEOUT_S)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_delay(caught.value) > 0
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S).status == SERVING
        wait_until(lambda: health.Check(ready, timeout=TIMEOUT_S).status == NOT_SERVING, "not ready")
        blocker.cancel()
        wait_until(lambda: health.Check(ready, timeout=TIMEOUT_S).status == SERVING, "ready again")
        stub.Complete(short_request(), timeout=TIMEOUT_S)
    wait_idle(small_server)


def retry_delay(error: grpc.RpcError) -> float:
    details = dict(error.trailing_metadata())["grpc-status-details-bin"]
    info = RetryInfo()
    assert Status.FromString(details).details[0].Unpack(info)
    return float(info.retry_delay.ToMicroseconds() / 1e6)


class Watcher:
    """Health.Watch in a thread, and what it has seen."""

    def __init__(self, server: ServerProcess) -> None:
        self.seen: list[int] = []
        self._server = server
        self._changed = threading.Condition()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def wait_for(self, *states: int) -> None:
        """Until these are the latest states, in order."""
        with self._changed:
            matches = self._changed.wait_for(lambda: self.seen[-len(states) :] == list(states), TIMEOUT_S)
        assert matches, self.seen

    def _watch(self) -> None:
        with self._server.channel() as channel, contextlib.suppress(grpc.RpcError):
            stub = health_pb2_grpc.HealthStub(channel)
            for reply in stub.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S):
                with self._changed:
                    self.seen.append(reply.status)
                    self._changed.notify_all()


def test_health_is_watched_through_a_servers_life(tiny_checkpoint: Path) -> None:
    """Loading, serving, loading again after a death, serving, draining."""
    with ServerProcess(tiny_checkpoint, "--engine", "simulated") as server:
        server.target = server.wait_for_line("listening on ")
        watcher = Watcher(server)
        watcher.wait_for(SERVING)
        assert watcher.seen in ([SERVING], [NOT_SERVING, SERVING])
        os.kill(server.status().workers[0].pid, signal.SIGKILL)
        watcher.wait_for(SERVING, NOT_SERVING, SERVING)
        server.send(signal.SIGTERM)
        watcher.wait_for(SERVING, NOT_SERVING, SERVING, NOT_SERVING)
        assert server.wait() == 0
        watcher.thread.join(TIMEOUT_S)
        assert not watcher.thread.is_alive()
