"""vllm.grpc.engine.VllmEngine: the protocol of the smg gateway, on the same machinery.

The gateway keeps templates, tokenizing and the OpenAI HTTP API to itself and sends token ids. It counts a
server that answers a Generate with UNIMPLEMENTED or INTERNAL as broken, so that one it should not have sent
is always INVALID_ARGUMENT here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from service.rpc.answers import AnswerDelta
from service.rpc.control import ServerControl
from service.rpc.errors import Context, InvalidRequest
from service.rpc.running import run_request
from service.rpc.sampling import check_count
from service.rpc.serving import ServedModel, Serving
from service.rpc.tokenizer_bundle import bundle_tokenizer
from service.rpc.validation import GenerateInput
from service.rpc.violations import Violations
from service.rpc.vllm_encoding import VllmEncoder
from service.rpc.vllm_requests import rename_fields, to_own_request
from worker.client import PAGE_SIZE, WorkerView

CHUNK_BYTES = 2**20
"""Sizes of the messages of GetTokenizer; any client takes 4 MB."""

MAX_ABORTED_IDS = 1024
"""Ids in one Abort: more than any gateway has on one server."""

_PROFILE_HINT = "not supported; slipstream.v1.Control.Profile measures a server's steps"


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """What the gateway calls."""

    def __init__(self, serving: Serving, server: ServerControl) -> None:
        self._serving = serving
        self._server = server
        self._last_request_at = 0.0

    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> None:  # noqa: N802
        arrival = time.perf_counter()
        self._last_request_at = time.time()
        with self._serving.request():
            model = self._serving.admitting()
            try:
                checked = await self._serving.read(request.ByteSize(), _validate, model, request)
                encoder = VllmEncoder(checked, request.stream)

                async def send(delta: AnswerDelta) -> None:
                    messages = encoder.responses(delta)
                    if delta.is_first and not messages and delta.index == 0:
                        # Admitted: headers let the gateway's call return, long before a first token.
                        await context.send_initial_metadata(())
                    for message in messages:
                        await context.write(message)

                serving = self._serving
                await run_request(serving, model, checked, context, arrival, send, needs_text=False)
            except InvalidRequest as error:
                raise InvalidRequest(rename_fields(error.violations)) from error

    async def Embed(self, request: vllm.EmbedRequest, context: Context) -> vllm.EmbedResponse:  # noqa: N802
        await _refuse(context, "this server generates text; it has no embedding model")

    async def HealthCheck(  # noqa: N802
        self, request: vllm.HealthCheckRequest, context: Context
    ) -> vllm.HealthCheckResponse:
        condition = self._serving.condition
        if condition.is_draining:
            return vllm.HealthCheckResponse(healthy=False, message="draining")
        if not any(condition.workers_ready):
            return vllm.HealthCheckResponse(healthy=False, message="loading")
        return vllm.HealthCheckResponse(healthy=True, message="serving")

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:  # noqa: N802
        violations = Violations()
        check_count("request_ids", len(request.request_ids), MAX_ABORTED_IDS, violations)
        violations.raise_if_any()
        for request_id in request.request_ids:
            await self._serving.pool.abort(request_id)
        return vllm.AbortResponse()

    async def GetModelInfo(  # noqa: N802
        self, request: vllm.GetModelInfoRequest, context: Context
    ) -> vllm.GetModelInfoResponse:
        return _model_info(self._serving.loaded())

    async def GetServerInfo(  # noqa: N802
        self, request: vllm.GetServerInfoRequest, context: Context
    ) -> vllm.GetServerInfoResponse:
        model, facts = self._serving.loaded(), self._server.facts()
        return vllm.GetServerInfoResponse(
            active_requests=self._serving.requests_open,
            is_paused=self._serving.condition.is_draining,
            last_receive_timestamp=self._last_request_at,
            uptime_seconds=facts.uptime_s,
            server_type="slipstream",
            data_parallel_size=1,
            kv_cache_dtype=model.info.kv_dtype,
            block_size=PAGE_SIZE,
            model_dtype=model.info.weight_dtype,
            max_num_seqs=model.capacity.slots * facts.workers,
        )

    async def GetLoads(  # noqa: N802
        self, request: vllm.GetLoadsRequest, context: Context
    ) -> vllm.GetLoadsResponse:
        load = _load(await self._serving.pool.statuses())
        return vllm.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=self._server.facts().version,
            dp_rank_count=1,
            loads=[] if request.dp_rank > 0 else [load],
        )

    async def GetTokenizer(  # noqa: N802
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> None:
        model = self._serving.loaded()
        bundle = await self._serving.in_thread(bundle_tokenizer, model.path, model.tokenizer)
        for start in range(0, len(bundle.data), CHUNK_BYTES):
            data = bundle.data[start : start + CHUNK_BYTES]
            is_last = start + len(data) == len(bundle.data)
            await context.write(
                common_pb2.GetTokenizerChunk(data=data, sha256=bundle.sha256 if is_last else "")
            )

    async def SubscribeKvEvents(  # noqa: N802
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> None:
        await _refuse(context, "this server does not publish KV cache events")

    async def FlushCache(  # noqa: N802
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        message = "not supported; a cache_salt of its own keeps a request from cached prefixes"
        return common_pb2.FlushCacheResponse(success=False, message=message)

    async def StartProfile(  # noqa: N802
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        return common_pb2.ProfileResponse(success=False, message=_PROFILE_HINT)

    async def StopProfile(  # noqa: N802
        self, request: common_pb2.StopProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        return common_pb2.ProfileResponse(success=False, message=_PROFILE_HINT)


async def _refuse(context: Context, message: str) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, message)


def _validate(model: ServedModel, request: vllm.GenerateRequest) -> GenerateInput:
    return model.validator.generate(to_own_request(request, model.capacity.max_sequence_length))


def _model_info(model: ServedModel) -> vllm.GetModelInfoResponse:
    tokenizer = model.tokenizer
    return vllm.GetModelInfoResponse(
        model_path=str(model.path),
        is_generation=True,
        max_context_length=model.capacity.max_sequence_length,
        vocab_size=model.info.vocab_size,
        served_model_name=model.name,
        tokenizer_path=str(model.path),
        model_type=model.info.architecture,
        architectures=[model.info.architecture],
        eos_token_ids=tokenizer.eos_token_ids,
        pad_token_id=tokenizer.pad_token_id or 0,
        bos_token_id=tokenizer.bos_token_id or 0,
        max_req_input_len=model.capacity.max_sequence_length - 1,
        default_sampling_params_json=json.dumps(dict(model.limits.unset)),
    )


def _load(views: Sequence[WorkerView]) -> vllm.SchedulerLoad:
    """All workers as one rank: this server places requests among them itself."""
    statuses = [view.status for view in views if view.status is not None]
    running = sum(status.running for status in statuses)
    waiting = sum(status.waiting for status in statuses)
    slots = sum(status.slots for status in statuses)
    pages = sum(status.pages for status in statuses)
    used = pages - sum(status.pages_free + status.pages_cached for status in statuses)
    return vllm.SchedulerLoad(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_total_reqs=running + waiting,
        num_used_tokens=used * PAGE_SIZE,
        max_total_num_tokens=pages * PAGE_SIZE,
        token_usage=used / pages if pages else 0.0,
        utilization=running / slots if slots else 0.0,
        max_running_requests=slots,
    )
