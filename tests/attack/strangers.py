"""Somebody on the same network: at every port that opens, with all that can be done without the secret.

``Strangers`` looks for new listening ports of this machine every millisecond, as a port scan would, and
sends a crowd to each: idle and half-closed connections, garbage, other protocols, resets, half a hello and a
wrong one, and a flood until the port is closed. All of it is bounded.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path

from skyctl.transport.handshake import MAGIC, NONCE_BYTES

LISTENS = "0A"
LOOPBACK = "0100007F"
RESET = struct.pack("ii", 1, 0)
HTTP = b"GET / HTTP/1.1\r\nHost: node\r\n\r\n"
FLOOD_PER_S = 300
MOST_HELD = 1200
"""Connections held at a time: more than the 1,024 files that most processes may open."""


def listening_ports(pid: int | str = "self") -> set[int]:
    """On loopback or on any address, in that process's network namespace."""
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        address, _, port = fields[1].partition(":")
        if fields[3] == LISTENS and address in (LOOPBACK, "00000000"):
            found.add(int(port, 16))
    return found


class Strangers:
    """``with Strangers() as strangers``: every port that opens meanwhile is attacked; ``ports`` has them.

    Args:
        source: the address of loopback that they come from.
    """

    def __init__(
        self, *, hold: int = 60, flood_per_s: int = FLOOD_PER_S, seed: int = 0, source: str = "127.0.0.1"
    ) -> None:
        self.ports: set[int] = set()
        self.connections = 0
        self._source = source
        self._known = listening_ports()
        self._hold, self._flood_per_s = hold, flood_per_s
        self._chance = random.Random(seed)
        self._held: list[socket.socket] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._scan, daemon=True)]

    def __enter__(self) -> Strangers:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._threads[0].join()
        for thread in self._threads[1:]:
            thread.join()
        for sock in self._held:
            sock.close()

    def _scan(self) -> None:
        while not self._ended.wait(0.001):
            now = listening_ports()
            for port in now - self._known:
                self.ports.add(port)
                self._threads.append(threading.Thread(target=self._attack, args=(port,), daemon=True))
                self._threads[-1].start()
            self._known = now

    def _attack(self, port: int) -> None:
        with suppress(OSError):  # the port is closed: all that was to be reached
            for _ in range(self._hold):
                self._connect(port, b"", keep=True)
            for said in (
                b"\0",
                HTTP,
                self._chance.randbytes(4096),
                MAGIC[:3],
                MAGIC + bytes(NONCE_BYTES + 32),
            ):
                self._connect(port, said, keep=True)
                self._connect(port, said, half_closed=True)
                self._connect(port, said, reset=True)
            while not self._ended.wait(1 / self._flood_per_s):
                self._connect(
                    port, self._chance.choice((b"", b"", HTTP, MAGIC)), keep=self._chance.random() < 0.5
                )

    def _connect(
        self, port: int, said: bytes, *, keep: bool = False, half_closed: bool = False, reset: bool = False
    ) -> None:
        sock = socket.create_connection(("127.0.0.1", port), 5, (self._source, 0))
        self.connections += 1
        with suppress(OSError):
            sock.sendall(said)
            if half_closed:
                sock.shutdown(socket.SHUT_WR)
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        if not (keep or half_closed):
            sock.close()
            return
        with self._lock:
            self._held.append(sock)
            oldest = self._held.pop(0) if len(self._held) > MOST_HELD else None
        if oldest is not None:
            oldest.close()
