"""The main process of a server: claims the port, finds the model, runs the cluster, ends with an exit code.

It speaks no gRPC and loads no engine. One server's life reads from top to bottom in Server.run.
"""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
import time
from pathlib import Path

import structlog

from service.cluster import Cluster
from service.console import Console
from service.front import FrontSettings
from service.http import Answers, HttpPort
from service.logs import configure_logs
from service.metrics import prometheus_text
from service.models import ModelNotFound, ResolvedModel, resolve_model
from service.options import ServeOptions
from service.ports import PortReservation, PortUnavailable
from service.secrets import check_secrets
from service.shutdown import ServerFailed, Shutdown, StoppedAtOnce
from worker.client import (
    EngineInfo,
    EngineOptions,
    KvDtype,
    Precision,
    SchedulerOptions,
    WorkerFailed,
    WorkerOptions,
)

log = structlog.get_logger(__name__)

EXIT_OK = 0
EXIT_FAILED = 1


def serve(options: ServeOptions) -> int:
    """Serves until drained; returns the process's exit code. To be called from the main thread."""
    configure_logs(options.log_format, options.log_level, process="main")
    with Console() as console:
        try:
            asyncio.run(_serve(options, console))
        except (ServerFailed, PortUnavailable, ModelNotFound, WorkerFailed) as error:
            console.error(str(error))
            return EXIT_FAILED
        except StoppedAtOnce as stop:
            console.error("stopped at once; running requests were cut off")
            return stop.exit_code
    return EXIT_OK


async def _serve(options: ServeOptions, console: Console) -> None:
    await Server(options, console).run()


class Server:
    """One server's life. Made inside the running event loop."""

    def __init__(self, options: ServeOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._started_at = time.time()
        self._shutdown = Shutdown()
        self._cluster: Cluster | None = None
        self._model_name = options.served_name or ""

    async def run(self) -> None:
        """Returns after a drain. Raises ServerFailed, PortUnavailable, ModelNotFound, WorkerFailed or
        StoppedAtOnce; every process is gone then."""
        self._handle_signals()
        check_secrets(self._options)
        reservation = PortReservation(self._options.host, self._options.port)
        http = self._open_http()
        try:
            model = await self._find_model()
            if model is not None:
                await self._run_cluster(model, reservation)
        finally:
            if http is not None:
                await asyncio.to_thread(http.close)
            reservation.close()

    async def _run_cluster(self, model: ResolvedModel, reservation: PortReservation) -> None:
        cluster = self._cluster = self._make_cluster(model, reservation)
        try:
            cluster.start()
            if await cluster.wait_listening():
                self._console.listening(reservation.reachable_address)
                engine = await cluster.wait_ready()
                if engine is not None:
                    self._announce(engine, reservation)
                    await cluster.wait_shutdown()
            await cluster.drain()
        finally:
            await cluster.close()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._shutdown.interrupt, number, self._options.drain_timeout)

    def _open_http(self) -> HttpPort | None:
        if not self._options.metrics_port:
            return None
        answers = Answers(self._metrics_text, self._is_ready)
        loop = asyncio.get_running_loop()
        return HttpPort(self._options.host, self._options.metrics_port, answers, loop)

    def _make_cluster(self, model: ResolvedModel, reservation: PortReservation) -> Cluster:
        self._model_name = self._options.served_name or model.served_name
        settings = FrontSettings(
            options=self._options,
            address=reservation.address,
            model_path=model.path,
            model_name=self._model_name,
            started_at=self._started_at,
        )
        workers = worker_options(self._options, model.path)
        return Cluster(workers, self._options.fronts, settings, self._shutdown, self._console)

    async def _find_model(self) -> ResolvedModel | None:
        """The model's files; None if the server is to end first.

        Raises ModelNotFound. A download may take long and cannot be interrupted, so it runs in a thread that
        does not keep the process alive.
        """
        loop = asyncio.get_running_loop()
        found: asyncio.Future[ResolvedModel] = loop.create_future()

        def settle(model: ResolvedModel | None, error: Exception | None) -> None:
            if found.done():
                return
            if model is not None:
                found.set_result(model)
            else:
                found.set_exception(error or RuntimeError("no model and no error"))

        def resolve() -> None:
            model, failure = None, None
            try:
                model = resolve_model(self._options.model, progress=progress, revision=self._options.revision)
            except Exception as error:  # noqa: BLE001  (raised on the event loop instead)
                failure = error
            loop.call_soon_threadsafe(settle, model, failure)

        def progress(stage: str, share: float) -> None:
            self._console.progress("model", stage, share)

        threading.Thread(target=resolve, name="model-lookup", daemon=True).start()
        shutdown = asyncio.ensure_future(self._shutdown.wait_wanted())
        await asyncio.wait((found, shutdown), return_when=asyncio.FIRST_COMPLETED)
        if shutdown.done():
            shutdown.result()
            return None
        shutdown.cancel()
        self._console.end_progress()
        return found.result()

    def _announce(self, engine: EngineInfo, reservation: PortReservation) -> None:
        address = reservation.reachable_address
        flags = "" if self._options.tls_cert is None else " --tls-ca FILE"
        flags += "" if self._options.auth_token_file is None else " --token TOKEN"
        self._console.ready(
            f"ready: {self._model_name} at {address} ({engine.engine} engine, {engine.device}). "
            f'Try: slipstream chat --target {address}{flags} "Hello"'
        )
        seconds = round(time.time() - self._started_at, 3)
        log.info("ready", address=address, model=self._model_name, engine=engine.engine, seconds=seconds)

    # ---- what the HTTP port asks

    async def _metrics_text(self) -> str:
        metrics = await self._cluster.metrics.collect() if self._cluster is not None else []
        return prometheus_text(metrics, self._model_name)

    async def _is_ready(self) -> bool:
        return self._cluster is not None and self._cluster.is_ready and not self._shutdown.is_wanted


def worker_options(options: ServeOptions, model: Path) -> WorkerOptions:
    """What of the server's options concerns the workers."""
    engine = EngineOptions(
        model=model,
        engine=options.engine,
        device=options.device,
        max_sequences=options.max_sequences,
        max_sequence_length=options.max_sequence_length,
        max_step_tokens=options.max_step_tokens,
        kv_pages=options.kv_pages,
        precision=Precision(options.precision),
        kv_dtype=KvDtype(options.kv_dtype),
        memory_fraction=options.memory_fraction,
        threads=options.threads,
        simulated_step_us=options.simulated_step_us,
    )
    scheduler = SchedulerOptions(
        max_queued=options.max_queued,
        prefill_policy=options.prefill_policy,
        prefill_tokens_beside_decodes=options.prefill_tokens_beside_decodes,
        prefix_caching=options.prefix_caching,
    )
    return WorkerOptions(
        engine=engine,
        workers=options.workers,
        scheduler=scheduler,
        configure_logs=functools.partial(_prepare_worker, options.log_format, options.log_level),
    )


def _prepare_worker(log_format: str, log_level: str, **role: object) -> None:
    """Runs in each worker. A service manager's SIGTERM goes to every process of the group; the worker has to
    outlive it, or a drain would begin with loading the model anew."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logs(log_format, log_level, **role)
