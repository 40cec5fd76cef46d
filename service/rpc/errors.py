"""How a call fails: one exception type that carries a gRPC status, and its way onto the wire.

INVALID_ARGUMENT carries a google.rpc.BadRequest that names fields; RESOURCE_EXHAUSTED and UNAVAILABLE
carry a google.rpc.RetryInfo where waiting helps. Knows nothing of models, workers or messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

import grpc
import structlog
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status

log = structlog.get_logger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext

DETAILS_KEY = "grpc-status-details-bin"

# Clients drop a call whose trailers pass 8 KiB (gRPC's default for metadata), and then see a different
# error. So what we say about bad input stays well below, whatever the input was.
MAX_MESSAGE_CHARACTERS = 1000
MAX_DESCRIPTION_CHARACTERS = 300
MAX_VIOLATIONS = 12


@dataclass(frozen=True, slots=True)
class Violation:
    """One field that cannot be used. `field` is its path, such as "chat.messages[2].role"."""

    field: str
    description: str


class RpcError(Exception):
    """Ends the call with a status. Raised by anything below a servicer."""

    def __init__(self, code: grpc.StatusCode, message: str, details: Sequence[Message] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.message = shorten(message, MAX_MESSAGE_CHARACTERS)
        self.details = tuple(details)

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """The details as gRPC's richer error model wants them; empty without details."""
        if not self.details:
            return ()
        status = Status(code=self.code.value[0], message=self.message)
        for detail in self.details:
            packed = AnyMessage()
            packed.Pack(detail)
            status.details.append(packed)
        return ((DETAILS_KEY, status.SerializeToString()),)


class InvalidRequest(RpcError):
    """INVALID_ARGUMENT naming every violation, the first few of them in full."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        message, details = _describe(violations)
        super().__init__(grpc.StatusCode.INVALID_ARGUMENT, message, [details])


def _describe(violations: Sequence[Violation]) -> tuple[str, BadRequest]:
    shown = [
        Violation(violation.field, shorten(violation.description, MAX_DESCRIPTION_CHARACTERS))
        for violation in violations[:MAX_VIOLATIONS]
    ]
    message = "; ".join(f"{violation.field}: {violation.description}" for violation in shown)
    if len(violations) > len(shown):
        message += f"; and {len(violations) - len(shown)} more"
    details = BadRequest(
        field_violations=[
            BadRequest.FieldViolation(field=violation.field, description=violation.description)
            for violation in shown
        ]
    )
    return message, details


def invalid_field(field: str, description: str) -> InvalidRequest:
    return InvalidRequest([Violation(field, description)])


def retry_later(code: grpc.StatusCode, message: str, after_s: float | None) -> RpcError:
    """RESOURCE_EXHAUSTED or UNAVAILABLE, with the wait that is likely to help, if one is known."""
    if after_s is None:
        return RpcError(code, message)
    delay = Duration()
    delay.FromMicroseconds(max(0, round(after_s * 1e6)))
    return RpcError(code, message, [RetryInfo(retry_delay=delay)])


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters of `text`, showing that something was left out."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def quote(text: str) -> str:
    """Input, short and printable, for an error message."""
    return repr(shorten(text, 60))


class StatusOnError:
    """`async with StatusOnError(context, "Inference.Complete"):` around a handler's body ends the call with
    the status of any RpcError, and with INTERNAL, logged, for a defect. Cancellation passes through."""

    __slots__ = ("_context", "_rpc")

    def __init__(self, context: Context, rpc: str) -> None:
        self._context = context
        self._rpc = rpc

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, grpc.aio.AbortError):
            return
        if not isinstance(error, RpcError):
            log.error("rpc_failed", rpc=self._rpc, exc_info=error)
            message = f"{self._rpc} failed inside the server; its log says more"
            error = RpcError(grpc.StatusCode.INTERNAL, message)
        await self._context.abort(error.code, error.message, error.trailing_metadata())
