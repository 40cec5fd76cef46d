"""vllm.grpc.engine requests to this project's own, so that one validation serves both protocols.

In that protocol the gateway tokenizes, renders and detokenizes; a plain (not optional) field left at zero
means its default there. What this server cannot do is refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

from smg_grpc_proto import vllm_engine_pb2 as vllm

from protos.slipstream.v1 import inference_pb2, sampling_pb2
from service.rpc.errors import Violation
from service.rpc.violations import Violations

_SEED_MASK = 2**64 - 1

_FIELD_NAMES = (
    ("sampling.include_stop", "sampling_params.include_stop_str_in_output"),
    ("sampling.", "sampling_params."),
    ("tokens.ids", "tokenized.input_ids"),
    ("prompt", "input"),
)
"""Our field paths as a caller of the other protocol knows them; the longer ones first."""

_UNSUPPORTED_MESSAGES = {
    "mm_inputs": "images and other media are not supported by this server",
    "media_refs": "images and other media are not supported by this server",
    "kv_transfer_params": "moving KV cache between servers is not supported",
    "kv_transfer_params_json": "moving KV cache between servers is not supported",
}


def to_own_request(request: vllm.GenerateRequest, max_sequence_length: int) -> inference_pb2.GenerateRequest:
    """The same request in slipstream.v1, not yet validated. Raises InvalidRequest for what has
    no counterpart there."""
    violations = Violations()
    _check_supported(request, violations)
    params = request.sampling_params
    own = inference_pb2.GenerateRequest(request_id=request.request_id)
    own.sampling.CopyFrom(_sampling(params, violations))
    kind = request.WhichOneof("input")
    if kind == "tokenized":
        ids = _truncated(request.tokenized.input_ids, params, max_sequence_length, violations)
        own.tokens.ids.extend(ids)
        own.tokens.SetInParent()
    elif kind == "text":
        if params.HasField("truncate_prompt_tokens"):
            violations.add("sampling_params.truncate_prompt_tokens", "needs tokenized input")
        own.text = request.text
    violations.raise_if_any()
    return own


def rename_fields(violations: Sequence[Violation]) -> list[Violation]:
    """Violations of our request, under the names that the caller knows."""
    renamed = []
    for violation in violations:
        field = violation.field
        for own, other in _FIELD_NAMES:
            if field.startswith(own):
                field = other + field[len(own) :]
                break
        renamed.append(Violation(field, violation.description))
    return renamed


def _check_supported(request: vllm.GenerateRequest, violations: Violations) -> None:
    for field, description in _UNSUPPORTED_MESSAGES.items():
        if request.HasField(field):
            violations.add(field, description)
    if request.extra_mm_inputs:
        violations.add("extra_mm_inputs", _UNSUPPORTED_MESSAGES["mm_inputs"])
    if request.data_parallel_rank > 0:
        violations.add("data_parallel_rank", f"is {request.data_parallel_rank}; this server has one rank, 0")
    constraint = request.sampling_params.WhichOneof("constraint")
    if constraint is not None:
        violations.add(f"sampling_params.{constraint}", "constrained decoding is not supported")


def _sampling(params: vllm.SamplingParams, violations: Violations) -> sampling_pb2.SamplingParams:
    """Every field set: the gateway has applied the model's defaults already (GetModelInfo gave them)."""
    own = sampling_pb2.SamplingParams(
        min_tokens=params.min_tokens,
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        include_stop=params.include_stop_str_in_output,
        n=params.n or 1,
    )
    if params.HasField("max_tokens"):
        own.max_tokens = params.max_tokens
    if params.HasField("seed"):
        own.seed = params.seed & _SEED_MASK
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name):
            count = getattr(params, name)
            if count < 0:
                violations.add(f"sampling_params.{name}", f"is {count}; the whole vocabulary is not reported")
            else:
                setattr(own, name, count)
    for token_id, bias in params.logit_bias.items():
        if token_id < 0:
            violations.add(f"sampling_params.logit_bias[{token_id}]", "names a negative token id")
        else:
            own.logit_bias[token_id] = bias
        if violations.is_full:
            break
    return own


def _truncated(
    ids: Sequence[int], params: vllm.SamplingParams, max_sequence_length: int, violations: Violations
) -> Sequence[int]:
    """The last truncate_prompt_tokens ids, where asked for; −1 stands for as many as can be served."""
    if not params.HasField("truncate_prompt_tokens"):
        return ids
    limit = params.truncate_prompt_tokens
    if limit == -1:
        limit = max_sequence_length - 1
    if limit < 1:
        violations.add("sampling_params.truncate_prompt_tokens", f"is {limit}; must be -1 or at least 1")
        return ids
    return ids[-limit:]
