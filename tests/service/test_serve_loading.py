"""A front before any worker is ready: it listens, says that it does not serve, and refuses kindly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.slipstream.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from service.front import FrontSettings
from service.fronts import FrontEvents, FrontGroup, FrontStage
from service.options import ServeOptions
from service.ports import PortReservation

DEADLINE_S = 60.0


def with_front(
    model: Path, check: Callable[[grpc.aio.Channel, FrontGroup, list[Any]], Awaitable[None]]
) -> None:
    """Runs `check` against a front whose main process is this one; it hears what the front says."""

    async def run() -> None:
        reservation = PortReservation("127.0.0.1", 0)
        settings = FrontSettings(ServeOptions(), reservation.address, model, "m", time.time(), b"key")
        heard: list[Any] = []
        events = FrontEvents(
            on_message=lambda index, message: heard.append(message),
            on_start=lambda index: None,
            on_gone=lambda index: None,
            on_failed=heard.append,
        )
        fronts = FrontGroup(settings, 1, events)
        fronts.start()
        try:
            await asyncio.wait_for(fronts.wait_stage(FrontStage.LISTENING), DEADLINE_S)
            async with grpc.aio.insecure_channel(reservation.address) as channel:
                await check(channel, fronts, heard)
        finally:
            await fronts.stop(5.0)
            reservation.close()

    asyncio.run(run())


def test_loading_is_not_serving_and_requests_are_to_be_tried_again(tiny_checkpoint: Path) -> None:
    async def check(channel: grpc.aio.Channel, fronts: FrontGroup, heard: list[Any]) -> None:
        health = health_pb2_grpc.HealthStub(channel)
        states = {
            name: (await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=DEADLINE_S)).status
            for name in ("", "liveness", "slipstream.v1.Inference")
        }
        serving, not_serving = (
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        )
        assert states == {"": not_serving, "liveness": serving, "slipstream.v1.Inference": not_serving}
        status = await control_pb2_grpc.ControlStub(channel).GetStatus(
            control_pb2.GetStatusRequest(), timeout=DEADLINE_S
        )
        assert status.state == control_pb2.SERVER_STATE_LOADING
        inference = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(text="x")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await anext(aiter(inference.Generate(request, timeout=DEADLINE_S)))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "loaded" in refused.value.details()
        assert b"RetryInfo" in dict(refused.value.trailing_metadata())["grpc-status-details-bin"]

    with_front(tiny_checkpoint, check)


def test_a_front_without_a_tokenizer_fails_for_good(tmp_path: Path) -> None:
    async def check(channel: grpc.aio.Channel, fronts: FrontGroup, heard: list[Any]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not heard or fronts.processes:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        (message,) = heard
        assert str(tmp_path) in message
        assert "\n" not in message
        assert fronts.restarts == 0

    with_front(tmp_path, check)
