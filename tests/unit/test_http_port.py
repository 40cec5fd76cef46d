"""The HTTP port against clients that send nonsense, too little, or nothing."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from service import http
from service.http import Answers, HttpPort

DEADLINE_S = 20.0


async def _metrics() -> str:
    return "a 1\n"


async def _is_ready() -> bool:
    return True


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(http, "REQUEST_TIMEOUT_S", 0.3)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = HttpPort("127.0.0.1", 0, Answers(_metrics, _is_ready), loop)
    yield server.port
    server.close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)


def answer(client: socket.socket) -> bytes:
    """All that comes until the server ends the connection."""
    return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize("beginning", [b"", b"GET /healthz HTTP/1.0\r\nX: ", b"\x16\x03\x01\x00\xf4"])
def test_a_request_that_never_ends_is_cut_off_however_it_drips(
    port: int, beginning: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with connect(port) as client:
        client.sendall(beginning)
        client.settimeout(0.05)
        try:
            while True:  # one byte each time that nothing comes
                try:
                    if client.recv(1) == b"":
                        break
                except TimeoutError:
                    client.sendall(b"x")
        except OSError:
            pass  # reset: cut off, too
    assert "Traceback" not in capfd.readouterr().err


def test_a_crowd_of_silent_clients_keeps_no_probe_waiting(port: int) -> None:
    with ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(connect(port))
        client = stack.enter_context(connect(port))
        client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert answer(client).endswith(b"alive\n")


def test_head_has_no_body(port: int) -> None:
    with connect(port) as client:
        client.sendall(b"HEAD /metrics HTTP/1.0\r\n\r\n")
        assert answer(client).endswith(b"Content-Length: 4\r\n\r\n")
