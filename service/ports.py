"""Claims a TCP port for several processes that will share it, before any of them listens.

With SO_REUSEPORT a second server on the same port would start without an error and take half of the
connections. So the port is first probed without that option, which fails if anybody has it, and then held
by a socket that never listens, until the server ends. Knows no RPC.
"""

from __future__ import annotations

import errno
import socket


class PortUnavailable(Exception):
    """The address cannot be listened on; the message says why and what to do."""


class PortReservation:
    """A port of `host` that is this program's until close(). Makes no connection wait: it does not listen."""

    def __init__(self, host: str, port: int) -> None:
        """`port` 0 takes a free one. Raises PortUnavailable."""
        self.host = host
        family, address = _resolve(host, port)
        try:
            if port:
                _probe(family, address)
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            # Not SO_REUSEADDR: with both sides setting it, another program's probe would succeed.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.bind(address)
        except OSError as error:
            raise PortUnavailable(explain(error, host, port, "--port")) from error
        self.port: int = self._socket.getsockname()[1]

    @property
    def address(self) -> str:
        """host:port, as gRPC wants it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def reachable_address(self) -> str:
        """The same, for a client on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host)
        return f"{host}:{self.port}" if host else self.address

    def close(self) -> None:
        self._socket.close()


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise PortUnavailable(f"cannot listen on {host!r}: {error.strerror}") from error
    family, _, _, _, address = found[0]
    return family, (str(address[0]), port)


def _probe(family: socket.AddressFamily, address: tuple[str, int]) -> None:
    """Raises OSError if any other socket has the port. SO_REUSEADDR lets connections that linger in
    TIME_WAIT after a restart not count."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)


def explain(error: OSError, host: str, port: int, flag: str) -> str:
    """Why listening failed, and which flag helps."""
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is taken by another program; choose another with {flag}"
    if error.errno == errno.EACCES:
        return f"port {port} of {host} needs privileges; choose one above 1023 with {flag}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine; choose another with --host"
    return f"cannot listen on {host}:{port}: {error.strerror}"
