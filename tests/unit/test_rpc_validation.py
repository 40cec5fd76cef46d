"""Every kind of malformed request: the right status, the field named, and a server that goes on."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from google.protobuf.struct_pb2 import Value

from protos.slipstream.v1 import inference_pb2 as pb
from service.rpc import validation
from service.rpc.errors import MAX_VIOLATIONS
from service.rpc.sampling import MAX_STOP_BYTES, MAX_STOP_STRINGS
from service.rpc.serving import INLINE_BYTES
from service.text import StopSet
from tests.unit.malformed_requests import (
    HI,
    INVALID,
    MALFORMED,
    NAN,
    NOT_FOUND,
    chat,
    chat_with_extra,
    chat_with_kwargs,
    sampling,
    text_request,
)
from tests.unit.rpc_harness import (
    VOCAB_SIZE,
    ScriptedGeneration,
    error_of,
    read_stream,
    rpc_server,
    run,
    violations_of,
)
from worker.client import FinishReason


def answer_at_once(generation: ScriptedGeneration) -> None:
    generation.start()
    generation.push([50, 51])
    generation.end(FinishReason.LENGTH)


def test_malformed_requests_name_the_field_and_the_server_goes_on(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            harness.pool.on_submit = answer_at_once
            for name, (request, code, field, words) in MALFORMED.items():
                error = await error_of(harness.inference.Complete(request))
                assert error.code() == code, f"{name}: {error}"
                assert words in (error.details() or ""), f"{name}: {error.details()}"
                if field:
                    violations = violations_of(error)
                    assert field in violations, f"{name}: {violations}"
                    assert words in violations[field], f"{name}: {violations}"
                _, stream_code, details = await read_stream(harness.inference.Generate(request))
                assert (stream_code, details) == (code, error.details()), name
            assert harness.pool.generations == []
            answer = await harness.inference.Complete(text_request())
            assert list(answer.completions[0].token_ids) == [50, 51]

    assert len(MALFORMED) >= 60
    run(scenario())


def test_violations_are_reported_together(tiny_checkpoint: Path) -> None:
    request = sampling(temperature=-1, top_p=2, n=0, stop=["", "ok", ""])
    request.request_id = "\n"
    request.tokens.ids.extend([1, VOCAB_SIZE, 3, VOCAB_SIZE + 7])

    async def scenario() -> dict[str, str]:
        async with rpc_server(tiny_checkpoint) as harness:
            return violations_of(await error_of(harness.inference.Complete(request)))

    assert set(run(scenario())) == {
        "request_id", "sampling.temperature", "sampling.top_p", "sampling.n", "sampling.stop[0]",
        "sampling.stop[2]", "tokens.ids[1]", "tokens.ids[3]",
    }  # fmt: skip


HOSTILE = {
    "many": lambda: sampling(
        stop=[""] * 64, logit_bias=dict.fromkeys(range(VOCAB_SIZE, VOCAB_SIZE + 999), 1e9)
    ),
    "long key": lambda: chat_with_kwargs(**{"k" * 1_000_000: Value()}),
    "many long keys": lambda: chat_with_kwargs(**{"語" * 1000 + str(i): Value() for i in range(100)}),
    "long unicode id": lambda: text_request(request_id="\u2028" * 10_000, model=""),
    "long unicode model": lambda: text_request(model="語" * 10_000),
    "deep struct": lambda: chat_with_extra(a=[[[[[[[[{"b": {"c": NAN}}]]]]]]]]),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_what_is_said_about_hostile_input_fits_a_status(tiny_checkpoint: Path, name: str) -> None:
    """Trailers beyond 8 KiB would reach the client as a different error."""

    async def scenario() -> grpc.aio.AioRpcError:
        async with rpc_server(tiny_checkpoint) as harness:
            return await error_of(harness.inference.Complete(HOSTILE[name]()))

    error = run(scenario())
    assert error.code() in (INVALID, NOT_FOUND)
    assert len(violations_of(error)) <= MAX_VIOLATIONS
    assert error.details()


@pytest.mark.parametrize("body", [b"\xff" * 40, b"\x1a\xff", b"\x1a\x02\xff\xfe", bytes(range(256))])
def test_bytes_that_are_no_message(tiny_checkpoint: Path, body: bytes) -> None:
    """The third is invalid UTF-8 in `text`."""

    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            harness.pool.on_submit = answer_at_once
            for method in ("Generate", "Complete"):
                kind = harness.channel.unary_stream if method == "Generate" else harness.channel.unary_unary
                call = kind(f"/slipstream.v1.Inference/{method}")(body)
                if method == "Generate":
                    _, code, _ = await read_stream(call)
                else:
                    code = (await error_of(call)).code()
                assert code == INVALID
            await harness.inference.Complete(text_request())

    run(scenario())


def test_bodies_of_random_bytes_never_end_the_server(tiny_checkpoint: Path) -> None:
    dice = random.Random(7)

    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            harness.pool.on_submit = answer_at_once
            raw = harness.channel.unary_unary("/slipstream.v1.Inference/Complete")
            good = text_request(sampling={"stop": ["x"], "temperature": 0.5}).SerializeToString()
            for _ in range(200):
                damaged = bytearray(good)
                for _ in range(dice.randint(1, 4)):
                    damaged[dice.randrange(len(damaged))] = dice.randrange(256)
                call = raw(bytes(damaged))
                assert await call.code() in (grpc.StatusCode.OK, INVALID, NOT_FOUND)
            await harness.inference.Complete(text_request())

    run(scenario())


def test_a_request_beyond_the_size_limit_is_refused(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            harness.pool.on_submit = answer_at_once
            request = text_request(text="x" * (33 * 2**20))
            error = await error_of(harness.inference.Complete(request))
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            await harness.inference.Complete(text_request())

    run(scenario())


def test_chat_without_a_template_says_so(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A base model's folder: the tokenizer's file alone."""
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((tiny_checkpoint / name).read_bytes())

    async def scenario() -> grpc.aio.AioRpcError:
        async with rpc_server(tmp_path) as harness:
            return await error_of(harness.inference.Complete(chat(HI)))

    assert "no chat template" in violations_of(run(scenario()))["chat"]


def test_a_template_that_refuses_the_conversation(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for file in tiny_checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
        "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
    )

    async def scenario() -> grpc.aio.AioRpcError:
        async with rpc_server(tmp_path) as harness:
            return await error_of(harness.inference.Complete(chat(("wizard", "abracadabra"))))

    error = run(scenario())
    assert error.code() == INVALID
    assert "Only user and assistant roles" in violations_of(error)["chat.messages"]


def test_tokenize_and_detokenize_refuse_bad_input(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            inference = harness.inference
            error = await error_of(inference.Tokenize(pb.TokenizeRequest()))
            assert violations_of(error).keys() == {"prompt"}
            error = await error_of(inference.Tokenize(pb.TokenizeRequest(text="a", model="b")))
            assert error.code() == NOT_FOUND
            error = await error_of(inference.Detokenize(pb.DetokenizeRequest(ids=[1, VOCAB_SIZE])))
            assert violations_of(error).keys() == {"ids[1]"}
            error = await error_of(inference.Detokenize(pb.DetokenizeRequest(ids=[1], model="b")))
            assert error.code() == NOT_FOUND
            error = await error_of(inference.Abort(pb.AbortRequest()))
            assert violations_of(error).keys() == {"request_id"}
            error = await error_of(inference.GetModelInfo(pb.GetModelInfoRequest(model="b")))
            assert error.code() == NOT_FOUND

    run(scenario())


def test_many_long_stop_strings_are_prepared_off_the_event_loop(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[tuple[int, str]] = []

    def build(stops: Sequence[str]) -> StopSet:
        built.append((sum(map(len, stops)), threading.current_thread().name))
        return StopSet(stops)

    monkeypatch.setattr(validation, "StopSet", build)
    most = [f"{i:04}" + "é" * 510 for i in range(MAX_STOP_STRINGS)]
    assert {len(stop.encode()) for stop in most} == {MAX_STOP_BYTES}

    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            harness.pool.on_submit = answer_at_once
            for stops in (most, most[:4], ["a few"]):
                await harness.inference.Complete(sampling(stop=stops))

    run(scenario())
    (_, many), (_, some), (_, few) = built
    assert many.startswith("prompt-reader")
    assert some.startswith("prompt-reader")
    assert few == threading.main_thread().name
    assert sum(len(stop.encode()) for stop in most[:4]) <= INLINE_BYTES
