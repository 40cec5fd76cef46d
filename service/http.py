"""The HTTP port for machines that do not speak gRPC: /metrics, /healthz (alive), /readyz (takes requests).

Runs in threads beside the main process's event loop, and asks that loop for every answer: if the loop hangs,
this port still answers, and says so. Knows paths and status codes, not what is behind them.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog
from prometheus_client import CONTENT_TYPE_LATEST

from service.ports import PortUnavailable, explain

log = structlog.get_logger(__name__)

TIMEOUT_S = 3.0
REQUEST_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 128
"""Each has a thread. Probes and scrapers need a handful; further ones are answered 503 at once."""
_FULL = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
_Result = TypeVar("_Result")
_TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Answers:
    """What the port serves; awaited on the event loop."""

    metrics: Callable[[], Coroutine[Any, Any, str]]
    """The Prometheus text."""
    is_ready: Callable[[], Coroutine[Any, Any, bool]]


class HttpPort:
    """Listens from construction to close()."""

    def __init__(self, host: str, port: int, answers: Answers, loop: asyncio.AbstractEventLoop) -> None:
        """Raises PortUnavailable."""
        self._answers, self._loop = answers, loop
        server = _Server6 if ":" in host else _Server
        try:
            self._server = make_server(host, port, self._respond, server, _QuietHandler)
        except OSError as error:
            raise PortUnavailable(explain(error, host, port, "--metrics-port")) from error
        self.port: int = self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="http", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _respond(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        status, content_type, body = self._route(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        data = body.encode()
        headers = [("Content-Type", content_type), ("Content-Length", str(len(data)))]
        start_response(status, headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [data]

    def _route(self, method: str, path: str) -> tuple[str, str, str]:
        """HTTP status, content type and body."""
        if method not in ("GET", "HEAD"):
            return "405 Method Not Allowed", _TEXT, "only GET\n"
        try:
            if path == "/metrics":
                return "200 OK", CONTENT_TYPE_LATEST, self._ask(self._answers.metrics())
            if path == "/healthz":
                self._ask(_alive())
                return "200 OK", _TEXT, "alive\n"
            if path == "/readyz":
                is_ready = self._ask(self._answers.is_ready())
                return (
                    ("200 OK", _TEXT, "ready\n")
                    if is_ready
                    else ("503 Service Unavailable", _TEXT, "not ready\n")
                )
        except TimeoutError:
            return "503 Service Unavailable", _TEXT, "the main process does not answer\n"
        return "404 Not Found", _TEXT, "try /metrics, /healthz or /readyz\n"

    def _ask(self, question: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(question, self._loop).result(TIMEOUT_S)


async def _alive() -> None:
    """Answered by the event loop, or not at all."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128  # with the usual 5, a few silly clients keep probes waiting for a second

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self._refuse(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread was started that would release it
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def _refuse(self, request: socket.socket) -> None:
        request.setblocking(False)  # the accepting thread waits for no client
        with contextlib.suppress(OSError):  # it is gone already
            request.send(_FULL)
        self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was too slow or went away is no event; the base class prints a traceback."""
        if not isinstance(sys.exc_info()[1], OSError):
            log.exception("http_request_failed")


class _Server6(_Server):
    address_family = socket.AF_INET6


class _UntilDeadline(io.RawIOBase):
    """What a client sends, until so many seconds have passed since it connected; then TimeoutError, however
    steadily it drips."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _QuietHandler(WSGIRequestHandler):
    """Scrapes are no events worth a log line. A client that does not finish its request is cut off."""

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_UntilDeadline(self.connection, REQUEST_TIMEOUT_S))

    def log_message(self, format: str, *args: Any) -> None:
        pass
