"""A chain of network namespaces with a link of its own between each two neighbours: rate and latency as told.

Unlike a lab's node, which has one network card for all its neighbours, a stage here has one for each, so that
a step can be held against the bound of a single link. Every link is a TAP at both ends and a pipe for each
direction in one user-space switch. Needs root. Run as a program, this file is the switch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from skyctl.lab import delay_switch, system_calls

HEADERS = 1514 / 1448
"""Ethernet frame over TCP payload: a rate is what a TCP stream carries."""
OWN = "own"
"""The interface that holds a namespace's own address."""


@dataclass(frozen=True)
class Wire:
    """One link, alike in both directions."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Chain:
    """Namespaces 0 … n by the process that holds each."""

    pids: tuple[int, ...]

    def prefix(self, number: int) -> list[str]:
        """Put before a command, runs it in that namespace."""
        return ["nsenter", "-t", str(self.pids[number]), "-n", "--"]

    @staticmethod
    def address(number: int, towards: int) -> str:
        """Of namespace ``number`` on its link to its neighbour ``towards``."""
        return f"10.213.{min(number, towards)}.{1 if number < towards else 2}"

    @staticmethod
    def own(number: int) -> str:
        """An address of namespace ``number`` that all others have a route to."""
        return f"10.214.{number}.1"


@contextmanager
def chain(wires: Sequence[Wire]) -> Iterator[Chain]:
    """``len(wires) + 1`` namespaces in a row; all of it is gone at the end."""
    holders: list[subprocess.Popen[bytes]] = []
    carrier: subprocess.Popen[bytes] | None = None
    try:
        for _ in range(len(wires) + 1):
            holder = subprocess.Popen(
                ["unshare", "-n", "sh", "-c", "echo; read _"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            holders.append(holder)
            assert holder.stdout is not None
            if not holder.stdout.readline():
                raise SystemExit("can't make a network namespace: this benchmark needs root")
        pids = [holder.pid for holder in holders]
        config = {"pids": pids, "wires": [[w.bytes_per_s * HEADERS, w.latency_s] for w in wires]}
        carrier = subprocess.Popen(
            [sys.executable, __file__, json.dumps(config)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert carrier.stdout is not None
        if carrier.stdout.readline() != b"ready\n":
            raise SystemExit("the switch between the namespaces did not start")
        yield Chain(tuple(pids))
    finally:
        for process in ([carrier] if carrier else []) + holders:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


class _Way:
    """One direction: a pipe, then the latency, then the far TAP."""

    def __init__(self, bytes_per_s: float, latency_s: float, target: int) -> None:
        self.pipe = delay_switch.UplinkPipe(bytes_per_s)
        self.latency_s, self.target = latency_s, target
        self.flying: deque[tuple[float, bytes]] = deque()

    def take(self, frame: bytes, now: float) -> None:
        passed = self.pipe.carry(delay_switch.wire_bytes(frame), now)
        if passed is not None:
            self.flying.append((passed + self.latency_s, frame))

    def deliver(self, now: float) -> None:
        while self.flying and self.flying[0][0] <= now:
            with contextlib.suppress(OSError):
                os.write(self.target, self.flying.popleft()[1])


def _enter(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if libc.setns(fd, system_calls.CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(fd)


def _sh(lines: Sequence[str]) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines) + "\n", text=True, check=True)


def _taps(pids: Sequence[int]) -> list[tuple[int, int]]:
    """Per link its two ends; addresses and routes are set on the way."""
    ends: list[tuple[int, int]] = [(-1, -1)] * (len(pids) - 1)
    for number, pid in enumerate(pids):
        _enter(pid)
        lines = ["link set lo up", f"link add {OWN} type bridge", f"link set {OWN} up"]
        lines.append(f"addr add {Chain.own(number)}/32 dev {OWN}")
        for other in (number - 1, number + 1):
            if not 0 <= other < len(pids):
                continue
            link = min(number, other)
            tap = delay_switch.open_tap(f"w{link}")
            ends[link] = (tap, ends[link][1]) if number < other else (ends[link][0], tap)
            lines += [f"addr add {Chain.address(number, other)}/24 dev w{link}", f"link set w{link} up"]
            beyond = range(number) if other < number else range(number + 1, len(pids))
            via = Chain.address(other, number)
            lines += [f"route add {Chain.own(k)}/32 via {via} src {Chain.own(number)}" for k in beyond]
        _sh(lines)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")
        system_calls.configure_tcp()
    return ends


def _switch(config: dict[str, list[list[float]]]) -> None:
    ends = _taps([int(pid) for pid in config["pids"]])  # type: ignore[call-overload]
    system_calls.set_timer_slack(1000)
    os.nice(-10)
    ways: dict[int, _Way] = {}
    for (left, right), (bytes_per_s, latency_s) in zip(ends, config["wires"], strict=True):
        ways[left] = _Way(bytes_per_s, latency_s, right)
        ways[right] = _Way(bytes_per_s, latency_s, left)
    print("ready", flush=True)
    taps = list(ways)
    while True:
        heads = [way.flying[0][0] for way in ways.values() if way.flying]
        timeout = max(0.0, min(heads) - time.monotonic()) if heads else None
        readable, _, _ = select.select([*taps, 0], [], [], timeout)
        if 0 in readable:
            return  # whoever started this is gone
        for fd in readable:
            with contextlib.suppress(OSError):  # nothing more to read
                for _ in range(64):
                    ways[fd].take(os.read(fd, 1 << 17), time.monotonic())
        now = time.monotonic()
        for way in ways.values():
            way.deliver(now)


if __name__ == "__main__":
    _switch(json.loads(sys.argv[1]))
