"""How client commands reach a server: where, with which security, and how a failure is told to a person.

Every failure is one clear line on stderr and a non-zero exit code; never a traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from service.cli.flags import Flag

if TYPE_CHECKING:
    import grpc

    from protos.slipstream.v1.control_pb2_grpc import ControlStub
    from protos.slipstream.v1.inference_pb2_grpc import InferenceStub

_GROUP = "Connection"
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

_CHANNEL_OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.use_local_subchannel_pool", 1)]
"""A long answer with log-probabilities can pass gRPC's default of 4 MB."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Flags that say which server to talk to."""

    target: Annotated[
        str, Flag("The server's address.", _GROUP, envvar="SLIPSTREAM_TARGET", metavar="HOST:PORT")
    ] = "127.0.0.1:50051"
    token: Annotated[
        str | None,
        Flag(
            "Bearer token, where the server asks for one.", _GROUP, envvar="SLIPSTREAM_TOKEN", metavar="TOKEN"
        ),
    ] = None
    tls: Annotated[bool, Flag("Use TLS, trusting the system's authorities.", _GROUP, names=("--tls",))] = (
        False
    )
    tls_ca: Annotated[
        Path | None, Flag("Use TLS, trusting this authority (PEM).", _GROUP, metavar="FILE")
    ] = None
    tls_cert: Annotated[
        Path | None,
        Flag("Client certificate (PEM), for mutual TLS. Needs --tls-key.", _GROUP, metavar="FILE"),
    ] = None
    tls_key: Annotated[
        Path | None, Flag("Private key (PEM) of the client certificate.", _GROUP, metavar="FILE")
    ] = None

    def __post_init__(self) -> None:
        # gRPC aborts the process when it gets one without the other.
        if (self.tls_cert is None) != (self.tls_key is None):
            fail("--tls-cert and --tls-key go together", 2)

    @property
    def is_secure(self) -> bool:
        return self.tls or self.tls_ca is not None or self.tls_cert is not None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What each call carries."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def credentials(self) -> grpc.ChannelCredentials:
        """TLS credentials from the files. Raises OSError."""
        import grpc

        root = self.tls_ca.read_bytes() if self.tls_ca else None
        key = self.tls_key.read_bytes() if self.tls_key else None
        certificate = self.tls_cert.read_bytes() if self.tls_cert else None
        return grpc.ssl_channel_credentials(root, key, certificate)

    def open(self) -> grpc.Channel:
        """A blocking channel. Connects at the first call."""
        import grpc

        if self.is_secure:
            return grpc.secure_channel(self.target, self.credentials(), _CHANNEL_OPTIONS)
        return grpc.insecure_channel(self.target, _CHANNEL_OPTIONS)

    def open_async(self) -> grpc.aio.Channel:
        """The same for asyncio."""
        import grpc.aio

        if self.is_secure:
            return grpc.aio.secure_channel(self.target, self.credentials(), _CHANNEL_OPTIONS)
        return grpc.aio.insecure_channel(self.target, _CHANNEL_OPTIONS)


def inference(channel: Any) -> InferenceStub:
    from protos.slipstream.v1.inference_pb2_grpc import InferenceStub

    return InferenceStub(channel)  # type: ignore[no-untyped-call]


def control(channel: Any) -> ControlStub:
    from protos.slipstream.v1.control_pb2_grpc import ControlStub

    return ControlStub(channel)  # type: ignore[no-untyped-call]


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """One line on stderr, then out."""
    typer.secho(f"error: {message}", fg="red", err=True)
    raise typer.Exit(code)


@contextmanager
def reporting_failures(connection: Connection) -> Iterator[None]:
    """Turns whatever a call can end with into one line and an exit code."""
    import grpc

    try:
        yield
    except grpc.RpcError as error:
        fail(describe(error, connection.target))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        typer.echo(err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None


_CONNECTION_PROBLEMS = (
    (
        "certificate_verify_failed",
        "the certificate of {target} is not trusted; name its authority by --tls-ca",
    ),
    ("hostname verification", "the certificate of {target} is for another host name"),
    ("wrong_version_number", "the server at {target} does not speak TLS; leave out the --tls flags"),
    (
        "security handshaker",
        "the files of --tls-ca, --tls-cert and --tls-key cannot be used; they must be PEM",
    ),
    ("handshake failed", "the TLS handshake with {target} failed; does it want a client certificate?"),
    ("http/2", "no gRPC server answers at {target}; is that its metrics port?"),
    (
        "socket closed",
        "{target} ends the connection at once; does it speak TLS (--tls or --tls-ca FILE), or want a client "
        "certificate (--tls-cert and --tls-key)?",
    ),
    ("", "no server answers at {target}; is `slipstream serve` running there?"),
)
"""What gRPC says of a connection that could not be made, in small letters, and what to tell people; the first
that fits."""


def describe(error: Any, target: str) -> str:
    """A failed call in one line: the status, what was wrong, and when to try again."""
    import grpc

    code, details = error.code(), error.details() or ""
    small = details.lower()
    not_connected = ("failed to connect", "connection refused", "resolution failed", "errors resolving")
    if code is grpc.StatusCode.UNAVAILABLE and any(phrase in small for phrase in not_connected):
        return next(told for phrase, told in _CONNECTION_PROBLEMS if phrase in small).format(target=target)
    wait = _retry_delay(error)
    advice = f" (try again in {wait:.1f} s)" if wait else ""
    return f"{code.name}: {' '.join(details.split())}{advice}"


def _retry_delay(error: Any) -> float | None:
    """Seconds of the error's google.rpc.RetryInfo. Field violations need no such care: the status
    message names them all."""
    from google.rpc.error_details_pb2 import RetryInfo
    from grpc_status import rpc_status

    try:
        status = rpc_status.from_call(error)
    except ValueError:  # code or message of the details disagree with the call's own
        return None
    for detail in status.details if status else ():
        info = RetryInfo()
        if detail.Unpack(info):
            return float(info.retry_delay.ToTimedelta().total_seconds())
    return None
