"""GenerateRequest, TokenizeRequest and DetokenizeRequest: from the wire to what the service can act on.

A request that passes here is right in every field: nothing malformed reaches a worker. Each violation names
its field's path; all that can be found without tokenizing are reported together. Knows no worker.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import grpc

from protos.slipstream.v1 import inference_pb2
from service.rpc.errors import RpcError, quote
from service.rpc.prompts import Prompt, PromptReader, report_too_long
from service.rpc.sampling import (
    SamplingLimits,
    check_sampling,
    check_token_ids,
    resolve_max_tokens,
    resolve_sampling,
)
from service.rpc.violations import Violations
from service.text import StopSet
from worker.client import Sampling

MAX_REQUEST_ID_CHARACTERS = 128
MAX_SALT_BYTES = 256


@dataclass(frozen=True, slots=True)
class GenerateInput:
    """A checked request with every default resolved."""

    request_id: str
    prompt: Prompt
    sampling: Sampling
    max_tokens: int
    """At least 1; prompt and output fit the context."""
    n: int
    priority: int
    cache_salt: str
    stops: StopSet | None
    stop_token_ids: frozenset[int]
    """Those of the request, without the model's own."""
    include_stop: bool
    echo: bool


class RequestValidator:
    """Validates requests to one model. Thread-safe; a long prompt takes long."""

    def __init__(
        self, model_name: str, reader: PromptReader, limits: SamplingLimits, max_sequence_length: int
    ) -> None:
        self._model_name = model_name
        self._reader = reader
        self._limits = limits
        self._max_sequence_length = max_sequence_length

    def check_model(self, name: str) -> None:
        """Raises RpcError NOT_FOUND if `name` is another model's."""
        if name and name != self._model_name:
            message = f"model {quote(name)} is not served here; this server has {self._model_name!r}"
            raise RpcError(grpc.StatusCode.NOT_FOUND, message)

    def generate(self, request: inference_pb2.GenerateRequest) -> GenerateInput:
        """Raises RpcError."""
        self.check_model(request.model)
        violations = Violations()
        params = request.sampling
        check_request_id(request.request_id, violations)
        salt_bytes = len(request.cache_salt.encode())
        if salt_bytes > MAX_SALT_BYTES:
            violations.add("cache_salt", f"has {salt_bytes} bytes; at most {MAX_SALT_BYTES} are allowed")
        check_sampling(params, self._limits.vocab_size, violations)
        prompt = self._reader.read(request, violations)
        violations.raise_if_any()
        assert prompt is not None
        room = self._check_length(prompt, violations)
        max_tokens = resolve_max_tokens(params, self._limits, room, violations)
        violations.raise_if_any()
        return GenerateInput(
            request_id=request.request_id or uuid.uuid4().hex,
            prompt=prompt,
            sampling=resolve_sampling(params, self._limits),
            max_tokens=max_tokens,
            n=params.n if params.HasField("n") else 1,
            priority=request.priority,
            cache_salt=request.cache_salt,
            stops=StopSet(params.stop) if params.stop else None,
            stop_token_ids=frozenset(params.stop_token_ids),
            include_stop=params.include_stop,
            echo=params.echo,
        )

    def tokenize(self, request: inference_pb2.TokenizeRequest) -> Prompt:
        """Of any length that could fit the context. Raises RpcError."""
        self.check_model(request.model)
        violations = Violations()
        add_special = not request.HasField("add_special_tokens") or request.add_special_tokens
        prompt = self._reader.read(request, violations, add_special)
        violations.raise_if_any()
        assert prompt is not None
        return prompt

    def detokenize(self, request: inference_pb2.DetokenizeRequest) -> list[int]:
        """The ids. Raises RpcError."""
        self.check_model(request.model)
        violations = Violations()
        check_token_ids("ids", request.ids, self._limits.vocab_size, violations)
        violations.raise_if_any()
        return list(request.ids)

    def _check_length(self, prompt: Prompt, violations: Violations) -> int:
        """Tokens left for the answer."""
        length = len(prompt.ids)
        if length == 0:
            violations.add(prompt.field, "holds no tokens; an answer needs at least one to go on from")
        if length >= self._max_sequence_length:
            report_too_long(prompt.field, length, self._max_sequence_length, violations)
        violations.raise_if_any()
        return self._max_sequence_length - length


def check_request_id(request_id: str, violations: Violations, field: str = "request_id") -> None:
    if len(request_id) > MAX_REQUEST_ID_CHARACTERS:
        length = len(request_id)
        violations.add(field, f"has {length} characters; at most {MAX_REQUEST_ID_CHARACTERS} are allowed")
    elif not request_id.isprintable():
        violations.add(field, "has characters that are not printable")
