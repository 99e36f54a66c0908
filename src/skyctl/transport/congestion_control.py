"""TCP's congestion control between machines that are near each other.

BBR keeps about twice what a path holds under way, which it reckons from the shortest round trip. On a local
network that is a few packets. A path that hands data on in bursts, such as a shaped or wireless one, and that
carries data and acknowledgements of both directions, runs dry between them: two connections of a node got
three quarters of their links there, and all of them with CUBIC (docs/probing.md). Over long ways, which may
lose packets, what the system has chosen stays.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

SHORT_S = 0.002
"""Longest round trip of machines that are near each other, as the kernel has seen it."""
BBR, CUBIC = b"bbr", b"cubic"
_NAME_BYTES = 16
_ROUND_TRIP_AT, _INFO_BYTES = 68, 104
"""Of ``struct tcp_info``: where ``tcpi_rtt`` is, in microseconds, and how much of it every Linux has."""


def suit_round_trip(sock: socket.socket) -> None:
    """Has a connected TCP socket use CUBIC in place of BBR if its round trip is short; else leaves it.

    Nothing changes on systems other than Linux, and if the kernel has no CUBIC.
    """
    if not hasattr(socket, "TCP_CONGESTION"):
        return
    with suppress(OSError):
        used = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES).split(b"\0")[0]
        if used == BBR and _round_trip_s(sock) <= SHORT_S:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CUBIC)


def _round_trip_s(sock: socket.socket) -> float:
    """The smoothed round trip as the kernel has it: no process has to run for its packets to be answered."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    (microseconds,) = struct.unpack_from("I", info, _ROUND_TRIP_AT)
    return float(microseconds) * 1e-6
