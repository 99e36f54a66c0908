"""A user-space switch between sites: it delays frames, and limits what each site's uplink carries.

A pair's own line that takes time is a switch of its own, between two TAPs in the pair's nodes.

One TAP a site, in the bridge of that site. A frame from site a to site b goes through a's uplink (out), takes
the latency, goes through b's uplink (in), and is written to b's TAP. An uplink is a pipe of a fixed rate,
first come first served, that drops what would wait longer than ``QUEUE_S``. Frames that stay in their site,
and the launcher's, never pass here (a bridge may flood one; it is dropped).

Frames carry the kernel's virtio header, so that a TCP segment of up to 64 KB is one read and one write
instead of 44. Standard library only; knows nothing of namespaces.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import select
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from skyctl.lab import system_calls

QUEUE_S = 0.1
QUEUE_BYTES = 131072
"""A short queue holds at least two of the largest segments, else slow uplinks would drop whole bursts."""

HEADER = 10
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_TUNSETVNETHDRSZ = 0x400454D8
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 1, 2, 4
_LARGEST = HEADER + 14 + 4 + 65536
_BATCH = 64


def open_tap(name: str) -> int:
    """Opens a TAP interface in this network namespace; it exists until the descriptor is closed."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(fd, _TUNSETVNETHDRSZ, struct.pack("i", HEADER))
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
    return fd


def wire_bytes(frame: bytes) -> int:
    """The bytes that a frame (virtio header first) takes on a wire, where large segments are cut up."""
    size = len(frame) - HEADER
    if frame[1] == 0:
        return size
    header_bytes: int
    piece_bytes: int
    _, _, header_bytes, piece_bytes = struct.unpack_from("=BBHH", frame)
    if piece_bytes == 0:
        return size
    pieces = -(-(size - header_bytes) // piece_bytes)
    return size + (pieces - 1) * header_bytes


class UplinkPipe:
    """One direction of a site's uplink: a queue in front of a fixed rate.

    Args:
        rate: bytes per second; None: unlimited.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self.free_at = 0.0
        self.limit_s = 0.0 if rate is None else max(QUEUE_S, QUEUE_BYTES / rate)

    def carry(self, size: int, at: float) -> float | None:
        """The time when a frame of ``size`` bytes that arrives at ``at`` has passed; None: it is dropped."""
        if self.rate is None:
            return at
        begin = max(at, self.free_at)
        if begin - at > self.limit_s:
            return None
        self.free_at = begin + size / self.rate
        return self.free_at


class DelaySwitch:
    """The state of the switch, apart from its descriptors.

    Args:
        sites: site of every node, by its MAC address (6 bytes).
        rates: each site's uplink in bytes per second, None: unlimited.
        latency_s: by site, one way from there to any other.
        write: called with a site and a frame when the frame has arrived there.
    """

    def __init__(
        self,
        sites: Mapping[bytes, int],
        rates: Sequence[float | None],
        latency_s: Sequence[float],
        write: Callable[[int, bytes], None],
    ) -> None:
        self.sites = dict(sites)
        self.latency_s = tuple(latency_s)
        self.write = write
        self.outgoing = [UplinkPipe(rate) for rate in rates]
        self.incoming = [UplinkPipe(rate) for rate in rates]
        # Each queue is in the order of its times. in_flight: (when, target, size, frame), by source.
        self.in_flight: list[deque[tuple[float, int, int, bytes]]] = [deque() for _ in rates]
        self.arriving: list[deque[tuple[float, bytes]]] = [deque() for _ in rates]
        self.dropped = 0

    def take(self, source: int, frame: bytes, now: float) -> None:
        """Accepts a frame that comes out of site ``source``."""
        if self.sites.get(frame[HEADER + 6 : HEADER + 12]) != source:
            return
        if frame[HEADER] & 1:
            targets: Sequence[int] = [site for site in range(len(self.outgoing)) if site != source]
        else:
            target = self.sites.get(frame[HEADER : HEADER + 6], source)
            if target == source:
                return
            targets = (target,)
        size = wire_bytes(frame)
        passed = self.outgoing[source].carry(size, now)
        if passed is None:
            self.dropped += 1
            return
        for target in targets:
            self.in_flight[source].append((passed + self.latency_s[source], target, size, frame))

    def deliver(self, now: float) -> float | None:
        """Writes the frames that have arrived by ``now``; returns the time of the next event, if any."""
        while True:
            # In the order of arrival across sources: they share the target's pipe.
            source = min(
                (s for s in range(len(self.in_flight)) if self.in_flight[s]),
                key=lambda s: self.in_flight[s][0][0],
                default=None,
            )
            if source is None or self.in_flight[source][0][0] > now:
                break
            at, target, size, frame = self.in_flight[source].popleft()
            passed = self.incoming[target].carry(size, at)
            if passed is None:
                self.dropped += 1
            elif passed <= now and not self.arriving[target]:
                self.write(target, frame)
            else:
                self.arriving[target].append((passed, frame))
        for target, queue in enumerate(self.arriving):
            while queue and queue[0][0] <= now:
                self.write(target, queue.popleft()[1])
        heads = [queue[0][0] for queue in self.in_flight if queue] + [q[0][0] for q in self.arriving if q]
        return min(heads, default=None)


@dataclass(frozen=True)
class SwitchPorts:
    """One switch: a TAP's descriptor a site, and what ``DelaySwitch`` is made of."""

    taps: Sequence[int]
    sites: Mapping[bytes, int]
    rates: Sequence[float | None]
    latency_s: Sequence[float]


def run_switches(wanted: Sequence[SwitchPorts]) -> None:
    """Runs the switches, each apart from the others, until the process ends."""
    system_calls.set_timer_slack(1000)
    with contextlib.suppress(OSError):
        os.nice(-10)
    gc.disable()  # nothing here makes circles, and a pause would be a delay
    switches = [DelaySwitch(w.sites, w.rates, w.latency_s, _writer(w.taps)) for w in wanted]
    ports = {
        fd: (switch, site)
        for switch, w in zip(switches, wanted, strict=True)
        for site, fd in enumerate(w.taps)
    }
    due: dict[DelaySwitch, float] = {}
    while True:
        first = min(due.values(), default=None)
        timeout = None if first is None else max(0.0, first - time.monotonic())
        readable, _, _ = select.select(list(ports), [], [], timeout)  # to the microsecond, unlike epoll
        heard = set()
        for fd in readable:
            switch, site = ports[fd]
            heard.add(switch)
            try:
                for _ in range(_BATCH):
                    switch.take(site, os.read(fd, _LARGEST), time.monotonic())
            except OSError:  # nothing more to read
                pass
        now = time.monotonic()
        for switch in heard | {switch for switch, at in due.items() if at <= now}:
            at = switch.deliver(time.monotonic())
            due.pop(switch, None)
            if at is not None:
                due[switch] = at


def _writer(taps: Sequence[int]) -> Callable[[int, bytes], None]:
    def write(site: int, frame: bytes) -> None:
        # A full queue or a bridge that is down loses the frame, as a wire would.
        with contextlib.suppress(OSError):
            os.write(taps[site], frame)

    return write
