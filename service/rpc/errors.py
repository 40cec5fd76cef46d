"""How a call fails: one exception type that carries a gRPC status, and its way onto the wire.

INVALID_ARGUMENT carries a google.rpc.BadRequest that names fields; RESOURCE_EXHAUSTED and UNAVAILABLE
carry a google.rpc.RetryInfo where waiting helps. Knows nothing of models, workers or messages.
"""

from __future__ import annotations

import asyncio
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

MAX_MESSAGE_BYTES = 1000
"""What we say of bad input stays below these limits, whatever the input was: clients drop a call whose
trailers pass 8 KiB (gRPC's default for metadata), and then see a different error. The message travels once as
text and once in the details, in base64. In bytes on the wire, where each byte of a character beyond ASCII
takes three."""
MAX_FIELD_BYTES = 200
MAX_DESCRIPTION_BYTES = 400
MAX_VIOLATIONS_BYTES = 2000
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
        self.message = shorten(message, MAX_MESSAGE_BYTES)
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
    details = BadRequest()
    texts: list[str] = []
    size = 0
    for violation in violations[:MAX_VIOLATIONS]:
        field = shorten(violation.field, MAX_FIELD_BYTES)
        description = shorten(violation.description, MAX_DESCRIPTION_BYTES)
        size += len(field.encode()) + len(description.encode())
        if texts and size > MAX_VIOLATIONS_BYTES:
            break
        details.field_violations.add(field=field, description=description)
        texts.append(f"{field}: {description}")
    if len(violations) > len(texts):
        texts[0] = f"{len(violations)} violations, the first {len(texts)} being: {texts[0]}"
    return "; ".join(texts), details


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
    """As much of `text` as takes `limit` bytes in a gRPC status message, showing that something was left
    out."""
    if len(text) * 9 <= limit:
        return text
    size = 0
    for i, character in enumerate(text):
        size += 1 if " " <= character <= "~" else 3 * len(character.encode("utf-8", "replace"))
        if size > limit:
            return text[:i] + "..."
    return text


def quote(text: str) -> str:
    """Input, short and printable, for an error message."""
    return repr(shorten(text, 60))


class StatusOnError:
    """Around a handler's body, ends the call with the status of any RpcError, and with INTERNAL, logged, for
    a defect. Cancellation passes through."""

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
        if isinstance(error, grpc.aio.InternalError):
            raise asyncio.CancelledError from error
        if not isinstance(error, RpcError):
            log.error("rpc_failed", rpc=self._rpc, exc_info=error)
            message = f"{self._rpc} failed inside the server; its log says more"
            error = RpcError(grpc.StatusCode.INTERNAL, message)
        try:
            await self._context.abort(error.code, error.message, error.trailing_metadata())
        except grpc.aio.InternalError as gone:
            raise asyncio.CancelledError from gone
