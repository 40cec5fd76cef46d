"""Who may connect and call: TLS from PEM files, and bearer tokens. Knows no service but Health, which
stays open so that orchestrators can probe without a secret."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from service.rpc.errors import Context

OPEN_METHODS = "/grpc.health.v1.Health/"
_SCHEME = b"bearer "


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. With `client_ca`, clients must show a certificate that it signed."""

    cert: Path
    key: Path
    client_ca: Path | None = None


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Raises OSError if a file cannot be read."""
    client_ca = files.client_ca.read_bytes() if files.client_ca else None
    return grpc.ssl_server_credentials(
        [(files.key.read_bytes(), files.cert.read_bytes())],
        root_certificates=client_ca,
        require_client_auth=client_ca is not None,
    )


def read_tokens(path: Path) -> tuple[str, ...]:
    """The bearer tokens in a file, one a line; empty lines and lines that start with # are left out.

    Raises OSError if the file cannot be read, ValueError if it holds no token or one that no HTTP header
    can carry.
    """
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    tokens = tuple(line for line in lines if line and not line.startswith("#"))
    if not tokens:
        raise ValueError(f"{path} holds no token")
    for number, token in enumerate(tokens, 1):
        if not (token.isascii() and token.isprintable()) or " " in token:
            raise ValueError(f"{path}: token {number} has characters other than printable ASCII")
    return tokens


class BearerAuth(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without `authorization: Bearer TOKEN` as UNAUTHENTICATED, health checks excepted."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = [token.encode() for token in tokens]
        self._refuse = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        details = handler_call_details
        if details.method.startswith(OPEN_METHODS) or self._is_allowed(details.invocation_metadata or ()):
            return await continuation(details)
        return self._refuse

    def _is_allowed(self, metadata: Sequence[tuple[str, str | bytes]]) -> bool:
        for key, value in metadata:
            if key == "authorization":
                given = value.encode() if isinstance(value, str) else value
                return given[: len(_SCHEME)].lower() == _SCHEME and self._is_known(given[len(_SCHEME) :])
        return False

    def _is_known(self, given: bytes) -> bool:
        """Takes the same time whichever token it is, and however much of one is right."""
        matches = [hmac.compare_digest(given, token) for token in self._tokens]
        return any(matches)


async def _refuse(requests: Any, context: Context) -> None:
    """Fits every kind of method: it ends the call before reading anything."""
    message = "this server wants a known token: authorization: Bearer TOKEN"
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)
