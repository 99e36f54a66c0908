"""The offset between two ranks' clocks: NTP's exchange over the line that they have anyway.

The requester notes when it asks (t0) and when the answer has arrived (t3), the responder when the request has
arrived (t1) and when it answers (t2). The responder's clock is ahead by ((t1 − t0) + (t2 − t3)) / 2, off by
at most half of the round trip without the responder's part, (t3 − t0) − (t2 − t1), however unlike the two
ways are. So the exchange with the shortest round trip counts (Mills 1991, Internet Time Synchronization: the
Network Time Protocol, sections III and IV).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from skyctl.worker.peer import CLOCK_TAG, Peer

MAX_ROUNDS = 16
MIN_ROUNDS = 4
ROUND_TIME_LIMIT_S = 0.3
"""After this long no further round is begun, beyond the least: a link may take 100 ms a way."""

_MORE_ROUNDS, _LAST_ROUND = 0.0, 1.0


class ClockOffset(NamedTuple):
    """At ``at_s`` of the requester's clock the responder's was ``offset_s`` ahead, within ``error_s``."""

    at_s: float
    offset_s: float
    error_s: float


def measure_clock_offset(peer: Peer, clock: Callable[[], float] = time.perf_counter) -> ClockOffset:
    """Compares this end's clock with that of the other, which calls ``answer_clock_requests`` meanwhile.

    Raises:
        PeerLostError, RunError: the connection's.
    """
    best: ClockOffset | None = None
    began = time.perf_counter()
    for number in range(1, MAX_ROUNDS + 1):
        late = number >= MIN_ROUNDS and time.perf_counter() - began > ROUND_TIME_LIMIT_S
        last = number == MAX_ROUNDS or late
        times = torch.zeros(2, dtype=torch.float64)
        reply = peer.recv(times, CLOCK_TAG)
        request = torch.full((1,), _LAST_ROUND if last else _MORE_ROUNDS, dtype=torch.float64)
        t0 = clock()
        sent = peer.send(request, CLOCK_TAG)
        reply.wait()
        t3 = clock()
        sent.wait()
        t1, t2 = times.tolist()
        offset = ClockOffset((t0 + t3) / 2, ((t1 - t0) + (t2 - t3)) / 2, ((t3 - t0) - (t2 - t1)) / 2)
        if best is None or offset.error_s < best.error_s:
            best = offset
        if last:
            break
    assert best is not None
    return best._replace(error_s=max(0.0, best.error_s))


def answer_clock_requests(peer: Peer, clock: Callable[[], float] = time.perf_counter) -> None:
    """The other end of ``measure_clock_offset``: returns after the last request.

    Raises:
        PeerLostError, RunError: the connection's.
    """
    while True:
        request = torch.zeros(1, dtype=torch.float64)
        peer.recv(request, CLOCK_TAG).wait()
        t1 = clock()
        times = torch.tensor([t1, 0.0], dtype=torch.float64)
        times[1] = clock()
        peer.send(times, CLOCK_TAG).wait()
        if request.item() == _LAST_ROUND:
            return
