"""The HTTP port for machines that do not speak gRPC: /metrics, /healthz (alive), /readyz (takes requests).

Runs in threads beside the main process's event loop, and asks that loop for every answer: if the loop hangs,
this port still answers, and says so. Knows paths and status codes, not what is behind them.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CONTENT_TYPE_LATEST

from service.ports import PortUnavailable, explain

TIMEOUT_S = 3.0
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
        return [data]

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


class _Server6(_Server):
    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    """Scrapes are no events worth a log line. A client that sends nothing is cut off."""

    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:
        pass
