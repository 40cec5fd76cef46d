"""A Slipstream client in Python: a streamed chat, cancelling, and what to do about errors.

Commands:

    python client.py chat "Why is the sky blue?"
    python client.py chat                          # a conversation, one line a turn
    python client.py cancel
    python client.py errors
"""

from __future__ import annotations

import argparse
import sys
import time
import uuid
from collections.abc import Iterator
from typing import TypeVar

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

# Made from the .proto files by generate_stubs.py.
from slipstream.v1 import inference_pb2 as pb
from slipstream.v1 import inference_pb2_grpc, sampling_pb2

ATTEMPTS = 30
RETRY_AFTER_S = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="localhost:50051", help="host:port (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer (default: %(default)s)")
    parser.add_argument("command", choices=["chat", "cancel", "errors"])
    parser.add_argument("prompt", nargs="?", help="chat: one question instead of a conversation")
    options = parser.parse_args()

    # One channel serves any number of calls and threads at once; open it once, not per call.
    with grpc.insecure_channel(options.target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            if options.command == "chat":
                chat(stub, options.prompt, options.max_tokens)
            elif options.command == "cancel":
                cancel(stub)
                abort_by_id(stub)
            else:
                errors(stub)
        except grpc.RpcError as error:
            print(describe(error), file=sys.stderr)
            return 1
    return 0


# ---- a streamed chat


def chat(stub: inference_pb2_grpc.InferenceStub, prompt: str | None, max_tokens: int) -> None:
    """One question, or a conversation that keeps its history, until the input ends."""
    history: list[pb.Message] = []
    for line in [prompt] if prompt is not None else questions():
        history.append(pb.Message(role="user", content=line))
        request = pb.GenerateRequest(
            chat=pb.Chat(messages=history),
            # Fields left out take the model's own defaults; a field set to 0 means 0.
            sampling=sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.2),
        )
        answer = ""
        for response in generate(stub, request, timeout_s=300.0):
            answer += response.text
            print(response.text, end="", flush=True)
            if response.finish_reason:
                report(response)
        history.append(pb.Message(role="assistant", content=answer))


def questions() -> Iterator[str]:
    while True:
        try:
            yield input("> ")
        except EOFError:
            return


def report(last: pb.GenerateResponse) -> None:
    """What the last message of a stream says about the whole."""
    usage, timings = last.usage, last.timings
    rate = f"{1 / timings.per_token:.1f}" if timings.per_token else "-"
    print(
        f"\n[{pb.FinishReason.Name(last.finish_reason)}: {usage.prompt_tokens} prompt tokens "
        f"({usage.cached_tokens} from cache), {usage.completion_tokens} generated, first after "
        f"{timings.first_token * 1000:.0f} ms, then {rate} tokens/s]",
        file=sys.stderr,
    )


def generate(
    stub: inference_pb2_grpc.InferenceStub, request: pb.GenerateRequest, timeout_s: float
) -> Iterator[pb.GenerateResponse]:
    """A stream that is started again while the server is busy, loading or restarting.

    Only before its first message: from then on part of the answer has been seen.
    """
    for attempt in range(ATTEMPTS):
        # The deadline travels with the call: once it passes, the server stops working on the request.
        stream = stub.Generate(request, timeout=timeout_s)
        has_begun = False
        try:
            for response in stream:
                has_begun = True
                yield response
            return
        except grpc.RpcError as error:
            wait_s = retry_delay(error)
            if has_begun or wait_s is None or attempt == ATTEMPTS - 1:
                raise
        finally:
            # If the caller stops listening early, the server is told at once. No effect on a finished call.
            stream.cancel()
        time.sleep(wait_s)


# ---- ending a request early


def cancel(stub: inference_pb2_grpc.InferenceStub, after_tokens: int = 5) -> None:
    """The client that reads a stream can end it; all that the request holds on the server is freed."""
    stream = stub.Generate(endless_request())
    tokens = 0
    try:
        for response in stream:
            tokens += len(response.token_ids)
            if tokens >= after_tokens:
                stream.cancel()
    except grpc.RpcError as error:
        print(f"cancelled after {tokens} tokens: {error.code().name}")


def abort_by_id(stub: inference_pb2_grpc.InferenceStub) -> None:
    """Anybody who knows a request's id can end it, from another process too."""
    request = endless_request()
    request.request_id = f"example-{uuid.uuid4()}"
    try:
        for response in stub.Generate(request):
            if response.token_ids:
                stub.Abort(pb.AbortRequest(request_id=request.request_id))
    except grpc.RpcError as error:
        print(f"aborted by id: {error.code().name}")


def endless_request() -> pb.GenerateRequest:
    """Generates until the model's context is full."""
    return pb.GenerateRequest(text="Count: 1, 2, 3,", sampling=sampling_pb2.SamplingParams(ignore_eos=True))


# ---- errors


def errors(stub: inference_pb2_grpc.InferenceStub) -> None:
    """Calls that go wrong, and what the client learns of each."""
    bad = sampling_pb2.SamplingParams(temperature=-1.0, top_p=3.0)
    trials = {
        "fields out of range": (pb.GenerateRequest(text="Hi", sampling=bad), None),
        "another model's name": (pb.GenerateRequest(text="Hi", model="no-such-model"), None),
        "too little time": (endless_request(), 0.05),
    }
    for name, (request, timeout_s) in trials.items():
        try:
            stub.Complete(request, timeout=timeout_s)
            print(f"{name}: answered all the same")
        except grpc.RpcError as error:
            print(f"{name}: {describe(error)}")


def describe(error: grpc.RpcError) -> str:
    """The status code and message, and the fields that a BadRequest names."""
    lines = [f"{error.code().name}: {error.details()}"]
    for violation in details_of(error, error_details_pb2.BadRequest).field_violations:
        lines.append(f"  {violation.field}: {violation.description}")
    return "\n".join(lines)


def retry_delay(error: grpc.RpcError) -> float | None:
    """Seconds after which trying again may help, or None if it will not."""
    if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
        return None
    delay = details_of(error, error_details_pb2.RetryInfo).retry_delay
    return delay.ToTimedelta().total_seconds() or RETRY_AFTER_S


Detail = TypeVar("Detail", bound=Message)


def details_of(error: grpc.RpcError, kind: type[Detail]) -> Detail:
    """The error's detail message of one kind; an empty one if there is none."""
    found = kind()
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else []:
        if detail.Unpack(found):
            break
    return found


if __name__ == "__main__":
    sys.exit(main())
