"""Runs one Generate call for a person at a terminal: shows text as it comes, and measures it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from protos.slipstream.v1.inference_pb2 import GenerateRequest
    from protos.slipstream.v1.inference_pb2_grpc import InferenceStub


@dataclass(slots=True)
class Answer:
    """One streamed answer and its figures. Times in seconds, from the call's start."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float = 0.0
    n_first: int = 0
    """Tokens in the first message that had any."""
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Decoding rate: tokens after the first message's, over the time they took. None where all came in
        one message."""
        if self.first_token_s is None or self.completion_tokens <= self.n_first:
            return None
        return (self.completion_tokens - self.n_first) / (self.last_token_s - self.first_token_s)

    def summary(self) -> str:
        """One line for people."""
        cached = f", {self.cached_tokens} cached" if self.cached_tokens else ""
        parts = [f"{self.completion_tokens} tokens", f"prompt {self.prompt_tokens}{cached}"]
        if self.first_token_s is not None:
            parts.append(f"first token {self.first_token_s * 1e3:.1f} ms")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        parts.append(f"finished by {self.finish_reason}")
        return " · ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "completion_tokens": self.completion_tokens,
            },
            "time_to_first_token_s": self.first_token_s,
            "total_s": self.total_s,
            "tokens_per_s": self.tokens_per_s,
        }


def stream_answer(
    stub: InferenceStub,
    request: GenerateRequest,
    *,
    metadata: tuple[tuple[str, str], ...] = (),
    timeout_s: float | None = None,
    on_text: Callable[[str], None] = lambda _: None,
) -> Answer:
    """Runs the call to its end. Raises grpc.RpcError. Ctrl-C cancels the call, then goes on upwards."""
    from protos.slipstream.v1.inference_pb2 import FinishReason

    answer = Answer()
    started = time.perf_counter()
    call = stub.Generate(request, metadata=metadata, timeout=timeout_s)
    try:
        for message in call:
            if message.token_ids:
                answer.last_token_s = time.perf_counter() - started
                if answer.first_token_s is None:
                    answer.first_token_s = answer.last_token_s
                    answer.n_first = len(message.token_ids)
            answer.token_ids.extend(message.token_ids)
            answer.text += message.text
            if message.HasField("usage"):
                answer.prompt_tokens = message.usage.prompt_tokens
                answer.cached_tokens = message.usage.cached_tokens
                answer.completion_tokens = message.usage.completion_tokens
            if message.finish_reason:
                answer.finish_reason = FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_")
            if message.text:
                on_text(message.text)
    except KeyboardInterrupt:
        call.cancel()
        raise
    answer.total_s = time.perf_counter() - started
    return answer
