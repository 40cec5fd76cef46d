"""slipstream.v1.Inference: one method per RPC, each reading as what it does.

Checks stand in validation, the run of a request in running, messages in encoding; an RpcError raised anywhere
becomes the call's status in interception.
"""

from __future__ import annotations

import time

from protos.slipstream.v1 import inference_pb2, inference_pb2_grpc
from service.rpc.answers import AnswerDelta
from service.rpc.encoding import CompletionBuilder, ResponseEncoder
from service.rpc.errors import Context, invalid_field
from service.rpc.running import run_request
from service.rpc.sampling import default_sampling
from service.rpc.serving import ServedModel, Serving
from service.rpc.validation import check_request_id
from service.rpc.violations import Violations
from worker.client import PAGE_SIZE


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """What applications call."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # noqa: N802
        """Streams through context.write rather than by yielding: a cancelled call then unwinds this
        coroutine at once, where an async generator waits to be collected."""
        arrival = time.perf_counter()
        with self._serving.request():
            model = self._serving.admitting()
            checked = await self._serving.read(request.ByteSize(), model.validator.generate, request)
            encoder = ResponseEncoder(checked, model.tokenizer)

            async def send(delta: AnswerDelta) -> None:
                await context.write(encoder.response(delta))

            await run_request(self._serving, model, checked, context, arrival, send)

    async def Complete(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.CompleteResponse:
        arrival = time.perf_counter()
        with self._serving.request():
            model = self._serving.admitting()
            checked = await self._serving.read(request.ByteSize(), model.validator.generate, request)
            encoder = ResponseEncoder(checked, model.tokenizer)
            completion = CompletionBuilder(checked)

            async def gather(delta: AnswerDelta) -> None:
                completion.add(encoder.response(delta))

            await run_request(self._serving, model, checked, context, arrival, gather)
            return completion.build()

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        model = self._serving.loaded()
        return await self._serving.read(request.ByteSize(), _tokenize, model, request)

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        model = self._serving.loaded()
        return await self._serving.read(request.ByteSize(), _detokenize, model, request)

    async def Abort(  # noqa: N802
        self, request: inference_pb2.AbortRequest, context: Context
    ) -> inference_pb2.AbortResponse:
        if not request.request_id:
            raise invalid_field("request_id", "is empty; name the request to end")
        violations = Violations()
        check_request_id(request.request_id, violations)
        violations.raise_if_any()
        return inference_pb2.AbortResponse(found=await self._serving.pool.abort(request.request_id))

    async def GetModelInfo(  # noqa: N802
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.GetModelInfoResponse:
        model = self._serving.loaded()
        model.validator.check_model(request.model)
        return model_info(model)


def _tokenize(model: ServedModel, request: inference_pb2.TokenizeRequest) -> inference_pb2.TokenizeResponse:
    prompt = model.validator.tokenize(request)
    return inference_pb2.TokenizeResponse(
        ids=prompt.ids,
        tokens=[model.tokenizer.token_bytes(token) for token in prompt.ids],
        text=prompt.text,
        max_sequence_length=model.capacity.max_sequence_length,
    )


def _detokenize(
    model: ServedModel, request: inference_pb2.DetokenizeRequest
) -> inference_pb2.DetokenizeResponse:
    ids = model.validator.detokenize(request)
    text = model.tokenizer.decode(ids, skip_special_tokens=request.skip_special_tokens)
    return inference_pb2.DetokenizeResponse(text=text)


def model_info(model: ServedModel) -> inference_pb2.GetModelInfoResponse:
    """What is being served, and its limits."""
    info, capacity, tokenizer = model.info, model.capacity, model.tokenizer
    return inference_pb2.GetModelInfoResponse(
        name=model.name,
        architecture=info.architecture,
        engine=info.engine,
        weight_dtype=info.weight_dtype,
        kv_dtype=info.kv_dtype,
        parameters=info.parameters,
        layers=info.layers,
        hidden_size=info.hidden_size,
        vocab_size=info.vocab_size,
        max_sequence_length=capacity.max_sequence_length,
        max_sequences=capacity.slots,
        max_queued_requests=model.max_queued,
        page_size=PAGE_SIZE,
        tokenizer=tokenizer.name,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=tokenizer.eos_token_ids,
        pad_token_id=tokenizer.pad_token_id,
        has_chat_template=tokenizer.has_chat_template,
        default_sampling=default_sampling(model.limits),
    )
