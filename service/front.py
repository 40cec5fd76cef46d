"""A front process: gRPC on the shared port, one of several. Everything else is asked of the main process.

It listens at once, so that health can be watched while the engine loads. Knows the control channel and what
stands where; what each RPC does stands in service.rpc.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import structlog

from service.control_channel import (
    BeginDrain,
    CollectMetrics,
    ControlChannel,
    DrainWanted,
    Finish,
    FrontFailed,
    FrontMetrics,
    Listening,
    MetricsWanted,
    ModelKnown,
    OpenStreams,
    ServerMetrics,
    WorkersChanged,
)
from service.front_instruments import FrontInstruments
from service.logs import configure_logs
from service.metrics import prometheus_text
from service.options import ServeOptions
from service.rpc.control import MetricsSnapshot, ServerFacts
from service.rpc.security import TlsFiles, read_tokens
from service.rpc.server import RpcOptions, RpcServer
from service.rpc.serving import ServedModel, Serving
from service.text import TextTokenizer, TokenizerError, load_tokenizer
from worker.client import (
    EngineCapacity,
    EngineInfo,
    MetricData,
    WorkerPool,
    WorkerReport,
    WorkerState,
    exit_with_parent,
)

log = structlog.get_logger(__name__)

METRICS_TIMEOUT_S = 3.0
STOP_GRACE_S = 1.0
_LIBRARIES = ("grpcio", "protobuf", "numpy", "tokenizers", "cuda-python")


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """What a front is told at its start. Picklable."""

    options: ServeOptions
    address: str
    """host:port, reserved by the main process; shared by all fronts."""
    model_path: Path
    model_name: str
    started_at: float
    """When the server started, as time.time()."""
    authkey: bytes = b""
    """Of the workers' sockets."""
    index: int = 0
    generation: int = 0
    """Counts the starts of this front, from 0."""

    def with_authkey(self, authkey: bytes) -> FrontSettings:
        return replace(self, authkey=authkey)


class FrontError(Exception):
    """This front cannot serve, and no other could with these settings; str() is one clear line."""


def front_main(settings: FrontSettings, channel_end: socket.socket) -> None:
    """The process's entry point."""
    options = settings.options
    configure_logs(options.log_format, options.log_level, process="front", front=settings.index)
    exit_with_parent(before_exit=_say_main_is_gone)  # whatever became of the event loop
    asyncio.run(_run(settings, channel_end))


def _say_main_is_gone() -> None:
    with suppress(OSError):  # whoever read our log may be gone, too
        log.error("main_process_gone")
        sys.stderr.flush()


async def _run(settings: FrontSettings, channel_end: socket.socket) -> None:
    channel = await ControlChannel.open(channel_end)
    front = Front(settings, channel)
    listening = asyncio.create_task(front.listen_to_main())
    try:
        await front.run()
    except FrontError as error:
        channel.send(FrontFailed(str(error)))
    finally:
        listening.cancel()
        await channel.close()


class Front:
    """One front's life, and what its Control servicer can ask of the server (ServerControl)."""

    def __init__(self, settings: FrontSettings, channel: ControlChannel) -> None:
        self._settings = settings
        self._instruments = FrontInstruments()
        self._channel = channel
        self._pool = WorkerPool(settings.index, settings.authkey, on_change=self._refresh)
        self._serving = Serving(self._pool, settings.options.workers, self._instruments)
        self._serving.on_request_over = self._on_request_over
        self._reports: tuple[WorkerReport, ...] = ()
        self._finish = asyncio.Event()
        self._metrics_wanted: asyncio.Future[list[MetricData]] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serves until told to finish. Raises FrontError."""
        rpc = self._make_server()
        waits = []
        try:
            self._channel.send(Listening(await self._listen(rpc)))
            waits = [asyncio.create_task(self._load_model()), asyncio.create_task(self._finish.wait())]
            loading, finished = waits
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not finished.done():
                loading.result()
            await finished
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            await rpc.stop(STOP_GRACE_S)
            await self._pool.close()

    async def listen_to_main(self) -> None:
        """Takes messages for as long as the main process is there, and ends this process with it."""
        async for message in self._channel.messages():
            self._on_message(message)
        _say_main_is_gone()
        os._exit(1)  # nobody would restart, watch or stop this process any more

    # ---- parts of the start

    def _make_server(self) -> RpcServer:
        options = self._settings.options
        tls: TlsFiles | None = None
        tokens: tuple[str, ...] = ()
        if options.tls_cert is not None and options.tls_key is not None:
            tls = TlsFiles(options.tls_cert, options.tls_key, options.tls_client_ca)
        try:
            if options.auth_token_file is not None:
                tokens = read_tokens(options.auth_token_file)
        except (OSError, ValueError) as error:
            raise FrontError(f"--auth-token-file: {error}") from error
        rpc_options = RpcOptions(reflection=options.reflection, tls=tls, tokens=tokens)
        return RpcServer(self._serving, self, rpc_options)

    async def _listen(self, rpc: RpcServer) -> int:
        try:
            return await rpc.start(self._settings.address)
        except RuntimeError as error:
            raise FrontError(f"cannot listen on {self._settings.address}: {error}") from error
        except OSError as error:
            raise FrontError(f"cannot read {error.filename}: {error.strerror}") from error

    async def _load_model(self) -> None:
        """The tokenizer while the engine loads; then all that requests need to know of the model."""
        path = self._settings.model_path
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, path)
        except TokenizerError as error:
            raise FrontError(str(error)) from error
        await self._pool.wait_connected()
        info, capacity = self._loaded_worker()
        self._serving.model = await asyncio.to_thread(self._served_model, tokenizer, info, capacity)
        self._refresh()
        self._channel.send(ModelKnown())

    def _loaded_worker(self) -> tuple[EngineInfo, EngineCapacity]:
        for report in self._reports:
            if report.info is not None and report.capacity is not None:
                return report.info, report.capacity
        raise RuntimeError("connected to a worker that has not reported itself")

    def _served_model(
        self, tokenizer: TextTokenizer, info: EngineInfo, capacity: EngineCapacity
    ) -> ServedModel:
        settings = self._settings
        return ServedModel.of(
            settings.model_name, settings.model_path, tokenizer, info, capacity, settings.options.max_queued
        )

    # ---- what the main process says

    def _on_message(self, message: Any) -> None:
        match message:
            case WorkersChanged(reports=reports):
                self._reports = reports
                self._pool.update(reports)
                self._refresh()
            case BeginDrain():
                self._serving.start_draining()
                self._on_request_over()
            case CollectMetrics(ticket=ticket):
                self._spawn(self._answer_metrics(ticket))
            case ServerMetrics(metrics=metrics):
                wanted, self._metrics_wanted = self._metrics_wanted, None
                if wanted is not None and not wanted.done():
                    wanted.set_result(metrics)
            case Finish():
                self._finish.set()

    def _refresh(self) -> None:
        """Health follows the workers, the queue and the drain."""
        is_loaded = self._serving.model is not None
        ready = [is_loaded and report.state is WorkerState.READY for report in self._reports]
        if ready:
            self._serving.set_workers(ready, self._pool.has_room)

    def _on_request_over(self) -> None:
        """While draining, the main process counts what is left."""
        if self._serving.condition.is_draining:
            self._channel.send(OpenStreams(self._serving.requests_open))

    async def _answer_metrics(self, ticket: int) -> None:
        views = await self._pool.statuses(timeout_s=0.5)
        workers = {
            (view.report.index, view.report.generation): view.status
            for view in views
            if view.status is not None
        }
        self._channel.send(FrontMetrics(ticket, self._instruments.export(), workers))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- ServerControl

    def facts(self) -> ServerFacts:
        options = self._settings.options
        return ServerFacts(
            version=_version("slipstream-serve"),
            uptime_s=time.time() - self._settings.started_at,
            fronts=options.fronts,
            front=self._settings.index,
            workers=options.workers,
            versions={"python": sys.version.split()[0]} | {name: _version(name) for name in _LIBRARIES},
        )

    async def metrics(self) -> MetricsSnapshot:
        """Calls at the same time share one question to the main process."""
        if self._metrics_wanted is None:
            self._metrics_wanted = asyncio.get_running_loop().create_future()
            self._channel.send(MetricsWanted())
        metrics = await asyncio.wait_for(asyncio.shield(self._metrics_wanted), METRICS_TIMEOUT_S)
        return MetricsSnapshot(metrics, prometheus_text(metrics, self._settings.model_name))

    def drain(self, timeout_s: float | None) -> None:
        self._channel.send(DrainWanted(timeout_s))


@functools.cache
def _version(package: str) -> str:
    """Reads a file, so it is asked for once."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
