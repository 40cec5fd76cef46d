"""Claiming a port that several processes will share, and noticing that somebody else has it."""

from __future__ import annotations

import socket

import pytest

from service.ports import PortReservation, PortUnavailable


def listener(*, shares: bool, port: int = 0) -> socket.socket:
    """Listens as gRPC does: with SO_REUSEADDR always, with SO_REUSEPORT if told so."""
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shares:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    taken.bind(("127.0.0.1", port))
    taken.listen()
    return taken


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_listener_is_noticed_even_if_it_shares_its_port(host: str, shares: bool) -> None:
    with listener(shares=shares) as taken, pytest.raises(PortUnavailable, match="taken"):
        PortReservation(host, taken.getsockname()[1])


def test_another_reservation_is_noticed() -> None:
    first = PortReservation("127.0.0.1", 0)
    with pytest.raises(PortUnavailable, match="taken"):
        PortReservation("127.0.0.1", first.port)
    first.close()
    PortReservation("127.0.0.1", first.port).close()


def test_fronts_can_listen_on_a_reserved_port_and_the_reservation_takes_no_connection() -> None:
    reservation = PortReservation("127.0.0.1", 0)
    fronts = [listener(shares=True, port=reservation.port) for _ in range(2)]
    for front in fronts:
        front.setblocking(False)
    for _ in range(32):  # with a third listener, one connection in three would be lost
        with socket.create_connection(("127.0.0.1", reservation.port), timeout=5) as client:
            client.settimeout(5)
            accepted = None
            for front in fronts:
                try:
                    accepted, _ = front.accept()
                except BlockingIOError:
                    continue
            assert accepted is not None
            accepted.close()
    for front in fronts:
        front.close()
    reservation.close()


def test_connections_that_linger_after_a_restart_do_not_count() -> None:
    reservation = PortReservation("127.0.0.1", 0)
    front = listener(shares=True, port=reservation.port)
    client = socket.create_connection(("127.0.0.1", reservation.port))
    accepted, _ = front.accept()
    accepted.close()  # the side that closes first keeps the connection in TIME_WAIT
    assert client.recv(1) == b""
    client.close()
    front.close()
    reservation.close()
    PortReservation("127.0.0.1", reservation.port).close()


def test_addresses_of_other_machines_and_unknown_names_are_refused() -> None:
    with pytest.raises(PortUnavailable, match="no address of this machine"):
        PortReservation("192.0.2.1", 50051)
    with pytest.raises(PortUnavailable, match=r"nowhere\.invalid"):
        PortReservation("nowhere.invalid", 50051)


def test_a_client_here_reaches_wildcard_addresses_by_loopback() -> None:
    reservation = PortReservation("0.0.0.0", 0)
    assert reservation.reachable_address == f"127.0.0.1:{reservation.port}"
    reservation.close()
