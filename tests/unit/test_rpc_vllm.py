"""The gateway's protocol (vllm.grpc.engine) over a scripted pool."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2
from tokenizers import pre_tokenizers

from service.rpc.tokenizer_bundle import bundle_tokenizer
from service.text import load_tokenizer
from tests.unit.rpc_harness import (
    MAX_LENGTH,
    VOCAB_SIZE,
    ScriptedGeneration,
    error_of,
    read_stream,
    rpc_server,
    run,
    violations_of,
)
from tests.unit.test_rpc_control import READY, view
from tests.unit.text_tools import gguf_of, trained_byte_level
from worker.client import FinishReason, Rejection, RejectReason, TokenLogprobs

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def tokenized(*ids: int, stream: bool = True, **params: Any) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(
        request_id="g1",
        tokenized=vllm.TokenizedInput(original_text="for reference only", input_ids=ids or (5, 6, 7)),
        sampling_params=vllm.SamplingParams(**params),
        stream=stream,
    )


def test_a_stream_of_chunks_and_a_complete(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            call = harness.vllm.Generate(tokenized(max_tokens=9))
            generation = await harness.pool.submitted()
            assert list(generation.request.prompt) == [5, 6, 7]
            assert (generation.request.request_id, generation.request.max_tokens) == ("g1", 9)
            generation.start(cached_tokens=2)
            await call.initial_metadata()  # at admission, before the first token
            generation.push([60, 0, 61])
            chunk = (await call.read()).chunk
            assert (chunk.prompt_tokens, chunk.cached_tokens) == (3, 2)
            assert (list(chunk.token_ids), chunk.completion_tokens, chunk.index) == ([60, 0, 61], 3, 0)
            generation.push([62])
            generation.end(FinishReason.LENGTH)
            chunk = (await call.read()).chunk
            assert (list(chunk.token_ids), chunk.completion_tokens) == ([62], 1)
            complete = (await call.read()).complete
            assert (complete.finish_reason, complete.prompt_tokens, complete.cached_tokens) == (
                "length",
                3,
                2,
            )
            assert complete.WhichOneof("matched_stop") is None
            assert await call.read() is grpc.aio.EOF
            assert generation.closed.is_set()

    run(scenario())


def test_without_streaming_each_answer_comes_whole(tiny_checkpoint: Path) -> None:
    logprobs = [TokenLogprobs(-0.5, 1, (9, 8), (-0.5, -0.7))]

    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            request = tokenized(stream=False, n=2, logprobs=2, prompt_logprobs=1, stop_token_ids=[77])
            call = harness.vllm.Generate(request)
            generation = await harness.pool.submitted()
            generation.push_prompt_logprobs([TokenLogprobs(-1.0, 1, (4,), (-0.1,))] * 2)
            for index in (0, 1):
                generation.push([60 + index], index, logprobs)
            while generation.reads < 1:
                await asyncio.sleep(0.001)
            for index in (0, 1):
                generation.push([77], index, logprobs)
                generation.end(FinishReason.STOP_TOKEN, index)
            messages, code, _ = await read_stream(call)
            assert code == grpc.StatusCode.OK
            completes = [message.complete for message in messages]
            assert [(one.index, list(one.output_ids)) for one in completes] == [(0, [60, 77]), (1, [61, 77])]
            assert all(one.completion_tokens == 2 for one in completes)
            assert all((one.finish_reason, one.matched_token_id) == ("stop", 77) for one in completes)
            output = completes[0].output_logprobs
            assert (list(output.token_ids), list(output.token_logprobs)) == ([60, 77], [-0.5, -0.5])
            assert list(output.top_logprobs[1].token_ids) == [9, 8]
            prompt = completes[0].input_logprobs
            assert list(prompt.token_ids) == [5, 6, 7]
            assert [one.HasField("value") for one in prompt.token_logprobs] == [False, True, True]
            assert [list(one.token_ids) for one in prompt.top_logprobs] == [[], [4], [4]]

    run(scenario())


def test_stop_strings_and_text_prompts(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:

            def script(generation: ScriptedGeneration) -> None:
                generation.push(harness.tokenizer.encode("the river. And"))
                generation.end(FinishReason.LENGTH)

            harness.pool.on_submit = script
            request = vllm.GenerateRequest(text="hello", sampling_params=vllm.SamplingParams(stop=["."]))
            messages, _, _ = await read_stream(harness.vllm.Generate(request))
            complete = messages[-1].complete
            assert (complete.finish_reason, complete.matched_stop_str) == ("stop", ".")
            assert harness.tokenizer.decode(complete.output_ids) == "the river."
            assert harness.pool.generations[0].request.prompt == harness.tokenizer.encode("hello")

    run(scenario())


def test_a_plain_field_left_at_zero_means_its_default(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            harness.pool.on_submit = lambda generation: generation.end(FinishReason.LENGTH)
            await read_stream(harness.vllm.Generate(tokenized()))
            sampling = harness.pool.generations[-1].request.sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
                1.0,
                1.0,
                0,
                0.0,
            )
            assert (sampling.repetition_penalty, sampling.logprobs) == (1.0, None)
            assert harness.pool.generations[-1].request.n == 1
            request = tokenized(temperature=0.0, seed=-1, logit_bias={3: -5.0}, ignore_eos=True, min_tokens=2)
            await read_stream(harness.vllm.Generate(request))
            sampling = harness.pool.generations[-1].request.sampling
            assert (sampling.temperature, sampling.seed) == (0.0, 2**64 - 1)
            assert (sampling.logit_bias, sampling.min_tokens) == ({3: -5.0}, 2)
            assert sampling.stop_token_ids == frozenset()
            long = tokenized(*range(1, 301), truncate_prompt_tokens=4)
            await read_stream(harness.vllm.Generate(long))
            assert harness.pool.generations[-1].request.prompt == [297, 298, 299, 300]
            long = tokenized(*[9] * 300, truncate_prompt_tokens=-1)
            await read_stream(harness.vllm.Generate(long))
            assert len(harness.pool.generations[-1].request.prompt) == MAX_LENGTH - 1

    run(scenario())


MEDIA = vllm.MultimodalInputs(mm_hashes=["a"])
REFUSED = {
    "input": vllm.GenerateRequest(),
    "tokenized.input_ids": vllm.GenerateRequest(tokenized=vllm.TokenizedInput()),
    "tokenized.input_ids[1]": tokenized(5, VOCAB_SIZE),
    "sampling_params.temperature": tokenized(temperature=-1),
    "sampling_params.top_p": tokenized(top_p=1.5),
    "sampling_params.max_tokens": tokenized(max_tokens=0),
    "sampling_params.min_tokens": tokenized(min_tokens=5, max_tokens=4),
    "sampling_params.n": tokenized(n=1000),
    "sampling_params.logprobs": tokenized(logprobs=-1),
    "sampling_params.prompt_logprobs": tokenized(prompt_logprobs=21),
    "sampling_params.logit_bias[-3]": tokenized(logit_bias={-3: 1.0}),
    "sampling_params.stop[0]": tokenized(stop=[""]),
    "sampling_params.truncate_prompt_tokens": tokenized(truncate_prompt_tokens=0),
    "sampling_params.json_schema": tokenized(json_schema="{}"),
    "sampling_params.regex": tokenized(regex="a*"),
    "sampling_params.json_object": tokenized(json_object=True),
    "request_id": vllm.GenerateRequest(request_id="\n", text="a"),
    "mm_inputs": vllm.GenerateRequest(text="a", mm_inputs=MEDIA),
    "extra_mm_inputs": vllm.GenerateRequest(text="a", extra_mm_inputs=[MEDIA]),
    "media_refs": vllm.GenerateRequest(text="a", media_refs=vllm.MediaRefs()),
    "kv_transfer_params": vllm.GenerateRequest(text="a", kv_transfer_params=vllm.KvTransferParams()),
    "kv_transfer_params_json": vllm.GenerateRequest(text="a", kv_transfer_params_json="{}"),
    "data_parallel_rank": vllm.GenerateRequest(text="a", data_parallel_rank=1),
}


def test_what_cannot_be_done_is_refused_by_the_callers_field_name(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            for field, request in REFUSED.items():
                call = harness.vllm.Generate(request)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() == INVALID, field
                assert violations_of(caught.value).keys() == {field}
            assert harness.pool.generations == []
            harness.pool.refuse = Rejection(RejectReason.TOO_LONG, "too long")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await harness.vllm.Generate(tokenized()).read()
            assert violations_of(caught.value) == {"tokenized.input_ids": "too long"}

    run(scenario())


def test_abort_and_disconnect(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            call = harness.vllm.Generate(tokenized())
            await harness.pool.submitted()
            await harness.vllm.Abort(vllm.AbortRequest(request_ids=["unknown", "g1"]))
            messages, code, _ = await read_stream(call)
            assert harness.pool.aborted == ["unknown", "g1"]
            assert code == grpc.StatusCode.CANCELLED
            assert messages[-1].complete.finish_reason == "abort"
            call = harness.vllm.Generate(tokenized())
            generation = await harness.pool.submitted(2)
            call.cancel()
            await generation.closed.wait()

    run(scenario())


def test_health_follows_the_condition(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            check = harness.vllm.HealthCheck
            assert (await check(vllm.HealthCheckRequest())).healthy
            harness.serving.set_workers([False], True)
            assert not (await check(vllm.HealthCheckRequest())).healthy
            harness.serving.set_workers([True], True)
            harness.serving.start_draining()
            reply = await check(vllm.HealthCheckRequest())
            assert (reply.healthy, reply.message) == (False, "draining")

    run(scenario())


def test_model_and_server_as_the_gateway_reads_them(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            model = await harness.vllm.GetModelInfo(vllm.GetModelInfoRequest())
            assert (model.served_model_name, model.is_generation) == ("tiny", True)
            assert (model.max_context_length, model.vocab_size) == (MAX_LENGTH, VOCAB_SIZE)
            assert model.tokenizer_path == str(tiny_checkpoint)
            assert list(model.eos_token_ids) == list(harness.tokenizer.eos_token_ids)
            assert set(json.loads(model.default_sampling_params_json)) == {
                "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
            }  # fmt: skip
            server = await harness.vllm.GetServerInfo(vllm.GetServerInfoRequest())
            assert (server.block_size, server.max_num_seqs, server.data_parallel_size) == (64, 4, 1)
            harness.pool.views = [view(0, READY)]
            loads = (await harness.vllm.GetLoads(vllm.GetLoadsRequest())).loads
            assert [
                (one.num_running_reqs, one.num_waiting_reqs, one.max_running_requests) for one in loads
            ] == [(3, 4, 4)]
            assert loads[0].token_usage == pytest.approx(49 / 64)

    run(scenario())


def test_the_tokenizer_travels_as_an_archive(tiny_checkpoint: Path) -> None:
    async def scenario() -> list[common_pb2.GetTokenizerChunk]:
        async with rpc_server(tiny_checkpoint) as harness:
            call = harness.vllm.GetTokenizer(common_pb2.GetTokenizerRequest())
            chunks, code, _ = await read_stream(call)
            assert code == grpc.StatusCode.OK
            return chunks

    chunks = run(scenario())
    data = b"".join(chunk.data for chunk in chunks)
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.read("tokenizer.json") == (tiny_checkpoint / "tokenizer.json").read_bytes()
        assert "model.safetensors" not in archive.namelist()


def test_what_is_not_offered_says_so(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            stub = harness.vllm
            error = await error_of(stub.Embed(vllm.EmbedRequest()))
            assert error.code() == grpc.StatusCode.UNIMPLEMENTED
            _, code, _ = await read_stream(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()))
            assert code == grpc.StatusCode.UNIMPLEMENTED
            assert not (await stub.FlushCache(common_pb2.FlushCacheRequest())).success
            assert not (await stub.StartProfile(common_pb2.StartProfileRequest())).success
            assert not (await stub.StopProfile(common_pb2.StopProfileRequest())).success

    run(scenario())


def test_a_gguf_files_tokenizer_travels_as_hugging_face_files(tmp_path: Path) -> None:
    original = trained_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    path = gguf_of(original, tmp_path / "model.gguf", "gpt-2", eos_token_id=2)
    ours = load_tokenizer(path)
    bundle = bundle_tokenizer(path, ours)
    assert bundle == bundle_tokenizer(path, ours)
    with zipfile.ZipFile(io.BytesIO(bundle.data)) as archive:
        archive.extractall(tmp_path / "files")
    read_back = load_tokenizer(tmp_path / "files")
    assert read_back.encode("the river 😀 and the sea") == ours.encode("the river 😀 and the sea")
    assert read_back.eos_token_ids == (2,)
