"""Message queues over real sockets: order, partial writes, merging, ends, handshakes."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from pathlib import Path
from queue import SimpleQueue

import pytest

from worker import queues
from worker.queues import MessageQueue, QueueClosed, QueueListener, connect

Pair = tuple[MessageQueue[object, object], MessageQueue[object, object]]
KEY = b"secret"


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    ends: Pair = (MessageQueue(left), MessageQueue(right))
    yield ends
    for end in ends:
        end.close()


def frame(messages: list[object]) -> bytes:
    body = pickle.dumps(messages)
    return struct.pack(">I", len(body)) + body


def test_messages_arrive_in_order_both_ways(pair: Pair) -> None:
    left, right = pair
    assert right.receive_all() == []
    for number in range(5):
        left.put(number)
    right.put({"a": b"\0" * 100})
    assert left.flush()
    assert right.flush()
    assert right.receive_all() == [0, 1, 2, 3, 4]
    assert left.receive_all() == [{"a": b"\0" * 100}]


def test_a_message_larger_than_the_socket_takes_several_turns(pair: Pair) -> None:
    left, right = pair
    big = bytes(range(256)) * 20_000
    left.put(big)
    left.put("after")
    turns, received = 0, []
    while not left.flush():
        turns += 1
        received += right.receive_all()
    while len(received) < 2:
        received += right.receive_all()
    assert turns > 1
    assert received == [big, "after"]
    assert not left.has_unsent


def test_nothing_blocks_while_the_other_end_does_not_read(pair: Pair) -> None:
    left, _ = pair
    for _ in range(100):
        left.put(b"x" * 100_000)
        left.flush()
    assert left.has_unsent
    assert len(left.waiting) >= 90


def test_what_waits_is_merged_and_what_is_being_sent_is_not() -> None:
    def merge(last: list[int], new: list[int]) -> bool:
        if len(last) >= 1000:
            return False
        last.extend(new)
        return True

    near, far = socket.socketpair()
    left: MessageQueue[list[int], object] = MessageQueue(near, merge)
    right: MessageQueue[object, list[int]] = MessageQueue(far)
    sent = list(range(300_000))
    left.put(sent.copy())
    assert not left.flush()
    for number in range(2500):
        left.put([number])
    assert [len(message) for message in left.waiting] == [1000, 1000, 500]
    received: list[list[int]] = []
    while not left.flush():
        received += right.receive_all()
    received += right.receive_all()
    assert received[0] == sent
    assert [number for message in received[1:] for number in message] == list(range(2500))
    left.close()
    right.close()


@pytest.mark.parametrize("cut", range(0, 30, 3))
def test_frames_cut_anywhere_are_put_together(cut: int) -> None:
    near, far = socket.socketpair()
    right: MessageQueue[object, object] = MessageQueue(far)
    data = frame(["one", 2]) + frame([3.0])
    near.sendall(data[:cut])
    received = right.receive_all()
    near.sendall(data[cut:])
    assert received + right.receive_all() == ["one", 2, 3.0]
    near.close()
    with pytest.raises(QueueClosed):
        right.receive_all()
    right.close()


def test_what_was_sent_before_the_end_is_received_and_half_a_message_is_dropped() -> None:
    near, far = socket.socketpair()
    right: MessageQueue[object, object] = MessageQueue(far)
    # Unread data in the closing end makes the kernel report a reset; that must not cost what was sent.
    right.put("never read")
    right.flush()
    near.sendall(frame(["last words"]) + frame(["torn"])[:-3])
    near.close()
    right.put("into the void")
    assert right.flush()
    assert right.receive_all() == ["last words"]
    with pytest.raises(QueueClosed):
        right.receive_all()
    right.close()


# ---- listening


@contextmanager
def listening(folder: Path) -> Iterator[tuple[str, SimpleQueue[socket.socket]]]:
    address, accepted = str(folder / "socket"), SimpleQueue[socket.socket]()
    listener = QueueListener(address, KEY, accepted.put)
    try:
        yield address, accepted
    finally:
        listener.close()
        listener.close()


def test_a_client_that_knows_the_key_is_connected(tmp_path: Path) -> None:
    with listening(tmp_path) as (address, accepted):
        near: MessageQueue[object, object] = MessageQueue(connect(address, KEY, timeout_s=10))
        far: MessageQueue[object, object] = MessageQueue(accepted.get(timeout=10))
        near.put("hello")
        assert near.flush()
        assert far.receive_all() == ["hello"]
        near.close()
        far.close()


def test_a_client_without_the_key_is_not(tmp_path: Path) -> None:
    with listening(tmp_path) as (address, accepted):
        with pytest.raises(AuthenticationError):
            connect(address, b"guess", timeout_s=10)
        good = connect(address, KEY, timeout_s=10)
        accepted.get(timeout=10).close()
        assert accepted.empty()
        good.close()


def test_nothing_is_unpickled_before_the_handshake(tmp_path: Path) -> None:
    with listening(tmp_path) as (address, accepted), socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(10)
        stranger.connect(address)
        stranger.sendall(frame([Bomb()]))
        while stranger.recv(4096):
            pass  # the challenge, then the end
        assert accepted.empty()
        assert not Bomb.exploded.is_set()


class Bomb:
    exploded = threading.Event()

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return (explode, ())


def explode() -> None:
    Bomb.exploded.set()


def test_a_silent_client_holds_up_nobody_and_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "HANDSHAKE_TIMEOUT_S", 0.2)
    with listening(tmp_path) as (address, accepted), socket.socket(socket.AF_UNIX) as silent:
        silent.settimeout(10)
        silent.connect(address)
        connect(address, KEY, timeout_s=10).close()
        accepted.get(timeout=10).close()
        while silent.recv(4096):
            pass
        assert accepted.empty()


def test_handshakes_under_way_are_limited(tmp_path: Path) -> None:
    with listening(tmp_path) as (address, accepted):
        silent = [socket.socket(socket.AF_UNIX) for _ in range(queues.MAX_HANDSHAKES)]
        for stranger in silent:
            stranger.connect(address)
            assert stranger.recv(1)  # its handshake has begun
        with pytest.raises((EOFError, OSError)):
            connect(address, KEY, timeout_s=10)
        for stranger in silent:
            stranger.close()
        # Places become free as their threads notice.
        while True:
            try:
                connect(address, KEY, timeout_s=10).close()
                break
            except (EOFError, OSError):
                continue
        accepted.get(timeout=10).close()


def test_connecting_to_nobody_or_to_somebody_dumb_ends(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        connect(str(tmp_path / "nobody"), KEY, timeout_s=10)
    with socket.socket(socket.AF_UNIX) as dumb:
        dumb.bind(str(tmp_path / "dumb"))
        dumb.listen()
        with pytest.raises(OSError, match="temporarily unavailable"):
            connect(str(tmp_path / "dumb"), KEY, timeout_s=0.1)
