"""Small programs that run in lab nodes and measure a link, and what starts them. Not a test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from tests.lab import fault_injection

from skyctl.lab.lab_state import LabState

_SINK = """
import socket, sys, time
server = socket.create_server(("", int(sys.argv[1])))
print("ready", flush=True)
peer, _ = server.accept()
buffer = bytearray(1 << 20)
peer.settimeout(10)
skip = time.monotonic() + float(sys.argv[3])
while time.monotonic() < skip:
    peer.recv_into(buffer)
begin, count = time.monotonic(), 0
while time.monotonic() - begin < float(sys.argv[2]):
    count += peer.recv_into(buffer)
print(count / (time.monotonic() - begin))
"""
_SOURCE = """
import socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
try:
    while True:
        peer.sendall(bytes(1 << 17))
except OSError:
    pass
"""
_ECHO = """
import socket
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind(("", 5002))
sock.settimeout(20)
print("ready", flush=True)
while True:
    data, sender = sock.recvfrom(2000)
    if data == b"end":
        break
    sock.sendto(data, sender)
"""
_PING = """
import socket, sys, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.connect((sys.argv[1], 5002))
sock.settimeout(5)
times = []
for _ in range(30):
    begin = time.perf_counter()
    sock.send(bytes(64))
    sock.recv(2000)
    times.append(time.perf_counter() - begin)
    time.sleep(0.005)
sock.send(b"end")
print(min(times))
"""
_BURN = """
import select, sys
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    for _ in range(100_000):
        pass
"""


def _start(state: LabState, node: str, program: str, *words: object) -> subprocess.Popen[str]:
    argv = fault_injection.command_in_node(
        state, node, [sys.executable, "-I", "-S", "-c", program, *map(str, words)]
    )
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def bytes_per_s(
    state: LabState, source: str, target: str, *, port: int = 5001, seconds: float = 1.5
) -> float:
    """The rate of one TCP stream, its beginning left out."""
    with _start(state, target, _SINK, port, seconds, 0.5) as sink:
        assert sink.stdout is not None
        assert sink.stdout.readline() == "ready\n"
        with _start(state, source, _SOURCE, state.node(target).address, port):
            return float(sink.stdout.read())


def bytes_per_s_together(state: LabState, pairs: list[tuple[str, str]], seconds: float = 2.5) -> list[float]:
    """The same for several streams at once."""
    with ThreadPoolExecutor(len(pairs)) as pool:
        futures = [
            pool.submit(bytes_per_s, state, source, target, port=5010 + i, seconds=seconds)
            for i, (source, target) in enumerate(pairs)
        ]
        return [future.result() for future in futures]


def round_trip_s(state: LabState, source: str, target: str) -> float:
    """The shortest of thirty."""
    with _start(state, target, _ECHO) as echo:
        assert echo.stdout is not None
        assert echo.stdout.readline() == "ready\n"
        with _start(state, source, _PING, state.node(target).address) as ping:
            return float(ping.communicate(timeout=60)[0])


@contextmanager
def burning(state: LabState, nodes: list[str]) -> Iterator[None]:
    """Keeps one core busy in every node while the block runs."""
    running = [_start(state, node, _BURN) for node in nodes]
    try:
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        yield
    finally:
        for process in running:
            process.communicate(timeout=60)
