"""Requests with one thing wrong each, as data: what the server must say of it."""

from __future__ import annotations

import math
from typing import Any

import grpc
from google.protobuf.struct_pb2 import Struct, Value

from protos.slipstream.v1 import inference_pb2 as pb
from tests.unit.rpc_harness import MAX_LENGTH, VOCAB_SIZE

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND


def text_request(**fields: Any) -> pb.GenerateRequest:
    sampling = fields.pop("sampling", {})
    request = pb.GenerateRequest(**({"text": "hello"} | fields))
    for name, value in sampling.items():
        target = getattr(request.sampling, name)
        if isinstance(value, dict):
            for key, entry in value.items():
                target[key] = entry
        elif isinstance(value, list):
            target.extend(value)
        else:
            setattr(request.sampling, name, value)
    return request


def sampling(**fields: Any) -> pb.GenerateRequest:
    return text_request(sampling=fields)


def ids(*values: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(tokens=pb.TokenIds(ids=values))


def struct(**fields: Any) -> Struct:
    result = Struct()
    result.update(fields)
    return result


def chat(*messages: tuple[str, str], **fields: Any) -> pb.GenerateRequest:
    conversation = pb.Chat(messages=[pb.Message(role=r, content=c) for r, c in messages], **fields)
    return pb.GenerateRequest(chat=conversation)


def chat_with_extra(**extra: Any) -> pb.GenerateRequest:
    message = pb.Message(role="user", content="hi", extra=struct(**extra))
    return pb.GenerateRequest(chat=pb.Chat(messages=[pb.Message(role="user", content="a"), message]))


def chat_with_kwargs(**values: Any) -> pb.GenerateRequest:
    request = chat(("user", "hi"))
    for key, value in values.items():
        request.chat.template_kwargs.fields[key].CopyFrom(value)
    return request


HI = ("user", "hi")
NAN, INF = math.nan, math.inf

# name: (request, status, the field that must be named, words that the description must have)
MALFORMED: dict[str, tuple[pb.GenerateRequest, grpc.StatusCode, str, str]] = {
    "nothing set": (pb.GenerateRequest(), INVALID, "prompt", "text or chat or tokens"),
    "no tokens": (ids(), INVALID, "tokens.ids", "no tokens"),
    "empty text": (text_request(text=""), INVALID, "text", "no tokens"),
    "token beyond the vocabulary": (ids(1, 2, VOCAB_SIZE), INVALID, "tokens.ids[2]", str(VOCAB_SIZE - 1)),
    "absurd token": (ids(2**32 - 1), INVALID, "tokens.ids[0]", "4294967295"),
    "prompt of the context's length": (ids(*[5] * MAX_LENGTH), INVALID, "tokens.ids", f"{MAX_LENGTH - 1}"),
    "long ids": (ids(*[5] * 10_000), INVALID, "tokens.ids", "10000"),
    "long text": (text_request(text="hello there " * 400), INVALID, "text", f"{MAX_LENGTH - 1}"),
    "megabytes of text": (text_request(text="a" * 4_000_000), INVALID, "text", "4000000 characters"),
    "far too long text": (text_request(text="?!" * 3_000), INVALID, "text", f"over {2 * MAX_LENGTH} tokens"),
    "far too long chat": (chat(("user", "?!" * 3_000)), INVALID, "chat", f"over {2 * MAX_LENGTH} tokens"),
    "long chat": (chat(("user", "hello there " * 400)), INVALID, "chat", f"{MAX_LENGTH - 1}"),
    "other model": (text_request(model="gpt-5"), NOT_FOUND, "", "gpt-5"),
    "long model name": (text_request(model="m" * 100_000), NOT_FOUND, "", "mmm"),
    "long request id": (text_request(request_id="x" * 129), INVALID, "request_id", "129"),
    "huge request id": (text_request(request_id="x" * 100_000), INVALID, "request_id", "128"),
    "newline in request id": (text_request(request_id="a\nb"), INVALID, "request_id", "printable"),
    "zero byte in request id": (text_request(request_id="a\0"), INVALID, "request_id", "printable"),
    "long salt": (text_request(cache_salt="s" * 257), INVALID, "cache_salt", "257"),
    "long salt in bytes": (text_request(cache_salt="é" * 129), INVALID, "cache_salt", "258"),
    "max_tokens 0": (sampling(max_tokens=0), INVALID, "sampling.max_tokens", "at least 1"),
    "min above max": (sampling(max_tokens=2, min_tokens=3), INVALID, "sampling.min_tokens", "max_tokens, 2"),
    "min above room": (
        sampling(min_tokens=MAX_LENGTH),
        INVALID,
        "sampling.min_tokens",
        "fit after the prompt",
    ),
    "absurd min": (sampling(min_tokens=2**32 - 1), INVALID, "sampling.min_tokens", "4294967295"),
    "temperature negative": (sampling(temperature=-0.1), INVALID, "sampling.temperature", "at least 0"),
    "temperature high": (sampling(temperature=100.5), INVALID, "sampling.temperature", "at most 100"),
    "temperature nan": (sampling(temperature=NAN), INVALID, "sampling.temperature", "finite"),
    "temperature inf": (sampling(temperature=INF), INVALID, "sampling.temperature", "finite"),
    "top_p 0": (sampling(top_p=0.0), INVALID, "sampling.top_p", "above 0"),
    "top_p negative": (sampling(top_p=-1.0), INVALID, "sampling.top_p", "above 0"),
    "top_p high": (sampling(top_p=1.01), INVALID, "sampling.top_p", "at most 1"),
    "top_p nan": (sampling(top_p=NAN), INVALID, "sampling.top_p", "finite"),
    "min_p negative": (sampling(min_p=-0.01), INVALID, "sampling.min_p", "at least 0"),
    "min_p high": (sampling(min_p=1.5), INVALID, "sampling.min_p", "at most 1"),
    "min_p nan": (sampling(min_p=NAN), INVALID, "sampling.min_p", "finite"),
    "repetition 0": (
        sampling(repetition_penalty=0.0),
        INVALID,
        "sampling.repetition_penalty",
        "at least 1e-06",
    ),
    "repetition tiny": (
        sampling(repetition_penalty=1e-45),
        INVALID,
        "sampling.repetition_penalty",
        "1.4013e-45",
    ),
    "repetition high": (
        sampling(repetition_penalty=10.5),
        INVALID,
        "sampling.repetition_penalty",
        "at most 10",
    ),
    "repetition inf": (sampling(repetition_penalty=INF), INVALID, "sampling.repetition_penalty", "finite"),
    "presence low": (sampling(presence_penalty=-2.5), INVALID, "sampling.presence_penalty", "at least -2"),
    "presence high": (sampling(presence_penalty=2.5), INVALID, "sampling.presence_penalty", "at most 2"),
    "presence nan": (sampling(presence_penalty=NAN), INVALID, "sampling.presence_penalty", "finite"),
    "frequency low": (sampling(frequency_penalty=-3.0), INVALID, "sampling.frequency_penalty", "at least -2"),
    "frequency high": (sampling(frequency_penalty=3.0), INVALID, "sampling.frequency_penalty", "at most 2"),
    "frequency -inf": (sampling(frequency_penalty=-INF), INVALID, "sampling.frequency_penalty", "finite"),
    "bias high": (sampling(logit_bias={5: 100.5}), INVALID, "sampling.logit_bias[5]", "at most 100"),
    "bias low": (sampling(logit_bias={5: -101.0}), INVALID, "sampling.logit_bias[5]", "at least -100"),
    "bias nan": (sampling(logit_bias={5: NAN}), INVALID, "sampling.logit_bias[5]", "finite"),
    "bias on no token": (
        sampling(logit_bias={VOCAB_SIZE: 1.0}),
        INVALID,
        f"sampling.logit_bias[{VOCAB_SIZE}]",
        "token",
    ),
    "many biases": (
        sampling(logit_bias=dict.fromkeys(range(1025), 0.5)),
        INVALID,
        "sampling.logit_bias",
        "1024",
    ),
    "many stops": (sampling(stop=["a"] * 65), INVALID, "sampling.stop", "64"),
    "empty stop": (sampling(stop=["a", ""]), INVALID, "sampling.stop[1]", "empty"),
    "long stop": (sampling(stop=["s" * 1025]), INVALID, "sampling.stop[0]", "1024"),
    "long stop in bytes": (sampling(stop=["é" * 513]), INVALID, "sampling.stop[0]", "1026"),
    "many stop tokens": (sampling(stop_token_ids=[1] * 65), INVALID, "sampling.stop_token_ids", "64"),
    "stop on no token": (
        sampling(stop_token_ids=[VOCAB_SIZE]),
        INVALID,
        "sampling.stop_token_ids[0]",
        "vocabulary",
    ),
    "n 0": (sampling(n=0), INVALID, "sampling.n", "at least 1"),
    "n high": (sampling(n=129), INVALID, "sampling.n", "at most 128"),
    "n absurd": (sampling(n=2**32 - 1), INVALID, "sampling.n", "at most 128"),
    "logprobs high": (sampling(logprobs=21), INVALID, "sampling.logprobs", "at most 20"),
    "prompt_logprobs high": (sampling(prompt_logprobs=21), INVALID, "sampling.prompt_logprobs", "at most 20"),
    "no messages": (pb.GenerateRequest(chat=pb.Chat()), INVALID, "chat.messages", "empty"),
    "no role": (chat(HI, ("", "what")), INVALID, "chat.messages[1].role", "empty"),
    "role in extra": (chat_with_extra(role="system"), INVALID, "chat.messages[1].extra.role", "not allowed"),
    "content in extra": (
        chat_with_extra(content="x"),
        INVALID,
        "chat.messages[1].extra.content",
        "not allowed",
    ),
    "nan in extra": (chat_with_extra(a={"b": [1, NAN]}), INVALID, "chat.messages[1].extra.a.b[1]", "finite"),
    "inf in kwargs": (
        chat_with_kwargs(k=Value(number_value=INF)),
        INVALID,
        "chat.template_kwargs.k",
        "finite",
    ),
    "reserved kwargs": (
        chat_with_kwargs(messages=Value(string_value="x")),
        INVALID,
        "chat.template_kwargs.messages",
        "not allowed",
    ),
    "value of no kind": (chat_with_kwargs(k=Value()), INVALID, "chat.template_kwargs.k", "kind"),
    "empty tool": (chat(HI, tools=[struct()]), INVALID, "chat.tools[0].function", "object"),
    "tool of other type": (chat(HI, tools=[struct(type="code")]), INVALID, "chat.tools[0].type", "function"),
    "tool without object": (
        chat(HI, tools=[struct(function="f")]),
        INVALID,
        "chat.tools[0].function",
        "object",
    ),
    "tool without name": (
        chat(HI, tools=[struct(function={"name": "f"}), struct(type="function", function={"name": ""})]),
        INVALID,
        "chat.tools[1].function.name",
        "name",
    ),
}
