"""Message queues between two processes, over a Unix-domain socket; neither end ever blocks or locks.

A worker listens in a private folder and every front connects to it, so each direction has exactly one
writer. A process killed at any instant leaves no lock held and at most half a message, which the other end
drops as it sees the end of file; multiprocessing.Queue has feeder threads, locks shared by all writers and
pipes that outlive a writer, and gets stuck where this does not. Connections open with multiprocessing's own
HMAC handshake, and nothing is unpickled before it.

A frame is a 4-byte big-endian length and the pickle (protocol 5) of a list of messages. Knows no message.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Generic, TypeVar

import structlog

log = structlog.get_logger(__name__)

_LENGTH = struct.Struct(">I")
_RECEIVE_BYTES = 1 << 18
_TIMEVAL = struct.Struct("@ll")

HANDSHAKE_TIMEOUT_S = 5.0
MAX_HANDSHAKES = 16
"""Connections that may be in their handshake at once; further ones are closed."""

Out = TypeVar("Out")
In = TypeVar("In")


class QueueClosed(Exception):
    """The other end is gone, and everything it sent has been received."""


class MessageQueue(Generic[Out, In]):
    """One end of a connection: messages of type Out leave, messages of type In arrive, in order."""

    def __init__(self, connection: socket.socket, merge: Callable[[Out, Out], bool] | None = None) -> None:
        """`connection` has passed its handshake. `merge(last, new)` may take `new` into `last`, the last
        message that waits to be sent, and return True; else False."""
        connection.setblocking(False)
        self._socket = connection
        self._merge = merge
        self._waiting: list[Out] = []
        self._unsent: memoryview | None = None
        self._received = bytearray()
        self._is_ended = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether something is still to be flushed."""
        return bool(self._waiting) or self._unsent is not None

    @property
    def waiting(self) -> list[Out]:
        """Messages that wait behind the frame that is being sent."""
        return self._waiting

    def put(self, message: Out) -> None:
        """Adds a message; flush() sends it. Takes ownership: merging may change it."""
        waiting = self._waiting
        if not (waiting and self._merge is not None and self._merge(waiting[-1], message)):
            waiting.append(message)

    def flush(self) -> bool:
        """Sends what the socket takes now. True if nothing remains; else call again when writable.

        An end that has closed is reported by receive_all(), after what it had still sent.
        """
        while self.has_unsent and not self._is_ended:
            if self._unsent is None:
                body = pickle.dumps(self._waiting, protocol=5)
                self._waiting = []
                self._unsent = memoryview(_LENGTH.pack(len(body)) + body)
            try:
                sent = self._socket.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                self._is_ended = True
                break
            self._unsent = self._unsent[sent:] if sent < len(self._unsent) else None
        return True

    def receive_all(self) -> list[In]:
        """All messages that have come, perhaps none. Raises QueueClosed once the other end is gone."""
        is_over = False
        while True:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            self._received += data
            is_over = not data
            if len(data) < _RECEIVE_BYTES:
                break
        messages = self._take_frames()
        if is_over and not messages:
            raise QueueClosed
        return messages

    def _take_frames(self) -> list[In]:
        messages: list[In] = []
        buffer, start = self._received, 0
        while len(buffer) - start >= _LENGTH.size:
            body = start + _LENGTH.size
            end = body + _LENGTH.unpack_from(buffer, start)[0]
            if len(buffer) < end:
                break
            with memoryview(buffer) as view:
                messages += pickle.loads(view[body:end])
            start = end
        if start:
            del buffer[:start]
        return messages

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()


class QueueListener:
    """Accepts connections on a Unix-domain socket and hands over those that prove to know the key.

    Accepting and the handshakes run in threads: a client that connects and says nothing, or nonsense, delays
    neither the owner nor other clients, and is dropped after HANDSHAKE_TIMEOUT_S.
    """

    def __init__(self, address: str, authkey: bytes, on_connected: Callable[[socket.socket], None]) -> None:
        """`on_connected` is called from a thread, with a connection to make a MessageQueue of."""
        self._authkey = authkey
        self._on_connected = on_connected
        self._free_handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(address)
        self._socket.listen(128)
        threading.Thread(target=self._accept, name="queue-accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            if not self._free_handshakes.acquire(blocking=False):
                log.warning("connection_refused", reason="too many handshakes under way")
                connection.close()
                continue
            threading.Thread(target=self._greet, args=(connection,), name="handshake", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            _handshake(connection, self._authkey, is_listener=True, timeout_s=HANDSHAKE_TIMEOUT_S)
        except (OSError, EOFError, AuthenticationError) as error:
            log.warning("connection_refused", reason=str(error) or type(error).__name__)
            connection.close()
        else:
            self._on_connected(connection)
        finally:
            self._free_handshakes.release()

    def close(self) -> None:
        """Idempotent. Connections that were handed over live on."""
        if self._socket.fileno() >= 0:
            # Closing alone would leave accept() in its thread waiting for ever.
            self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()


def connect(address: str, authkey: bytes, timeout_s: float) -> socket.socket:
    """Connects to a QueueListener and passes its handshake. Blocks, at most about `timeout_s`.

    Raises OSError if nobody listens or time runs out, EOFError if the other end hangs up,
    AuthenticationError if the keys differ.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(address)
        _handshake(connection, authkey, is_listener=False, timeout_s=timeout_s)
    except BaseException:
        connection.close()
        raise
    return connection


def _handshake(connection: socket.socket, authkey: bytes, *, is_listener: bool, timeout_s: float) -> None:
    """Each end proves to know the key. The connection is left in blocking mode.

    multiprocessing's functions block in read and write, so the time limit is set in the kernel, where it
    makes those fail.
    """
    connection.setblocking(True)
    seconds = int(timeout_s)
    limit = _TIMEVAL.pack(seconds, int((timeout_s - seconds) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    with Connection(os.dup(connection.fileno())) as stream:
        if is_listener:
            deliver_challenge(stream, authkey)
            answer_challenge(stream, authkey)
        else:
            answer_challenge(stream, authkey)
            deliver_challenge(stream, authkey)
