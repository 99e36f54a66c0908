"""BBR gives way to CUBIC on connections whose round trip is short, and on no others."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyctl.transport import congestion_control
from skyctl.transport.congestion_control import suit_round_trip

AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()


def used(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()


@pytest.fixture
def connected() -> Iterator[socket.socket]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0],
    ):
        yield ours


@pytest.mark.parametrize("control", AVAILABLE)
def test_over_loopback_bbr_alone_is_changed(connected: socket.socket, control: str) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
    suit_round_trip(connected)
    changes = control == "bbr" and "cubic" in AVAILABLE
    assert used(connected) == ("cubic" if changes else control)


@pytest.mark.parametrize("control", AVAILABLE)
def test_over_a_long_way_nothing_changes(
    connected: socket.socket, control: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(congestion_control, "_round_trip_s", lambda _sock: 0.04)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
    suit_round_trip(connected)
    assert used(connected) == control


def test_what_has_no_congestion_control_is_left_alone() -> None:
    here, there = socket.socketpair()
    with here, there:
        suit_round_trip(here)


def test_the_kernels_round_trip_is_read(connected: socket.socket) -> None:
    assert 0 < congestion_control._round_trip_s(connected) < 0.5
