"""Latency and bandwidth between two nodes, over the very transport that training uses.

Both ends run ``measure`` on a connected pair; each reports the direction in which it sends.

* ``latency_s``: half the shortest round trip of 8-byte messages whose receives are posted ahead. They go in
  small bursts with a rest before each: a process that a CPU quota has held back may run again after it, so
  that its waits are not taken for the network's. (What a message costs a stage is ``handling``'s to measure.)
* ``bandwidth_bytes_per_s``: from the time between sending a message and the receiver's word that it has
  arrived, of a large message less that of one a quarter of its size: what both have in common (latency,
  software, a token bucket's burst) drops out. Of several trials the shortest counts: lost packets and waits
  for a processor only ever add time. The size adapts to the link, so a slow one takes no more time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from skyctl.transport.pair import FIRST_TAG, Work

BURSTS = 6
BURST = 3
REST_S = 0.02
PING_BUDGET_S = 0.6
FIRST_BYTES = 64 << 10
LARGEST_BYTES = 8 << 20
ENOUGH_S = 0.25
TRIALS = 2
MOST_TRIALS = 8
AGREE = 0.03
"""Trials go on until the two shortest differ by no more than this part, or ``TRIALS_BUDGET_S`` are over."""
TRIALS_BUDGET_S = 2.5

_ORDER, _GO, _DATA, _ACK = FIRST_TAG, FIRST_TAG + 1, FIRST_TAG + 2, FIRST_TAG + 3
_END = 0
_PING = 1


class Line(Protocol):
    """What is measured: a connected ``Pair`` (a test's fake has just these)."""

    def send(self, tensor: torch.Tensor, tag: int) -> Work:
        """Starts sending."""

    def recv(self, tensor: torch.Tensor, tag: int) -> Work:
        """Starts receiving."""


@dataclass(frozen=True)
class LinkFigures:
    """One direction."""

    latency_s: float
    bandwidth_bytes_per_s: float


def measure(line: Line, first: bool, device: str = "cpu") -> LinkFigures:
    """Both directions in turn; both ends must call it, exactly one with ``first``.

    Args:
        device: where messages lie, as training's do (a CUDA tensor's way through host memory counts).

    Returns:
        The direction in which this end sends.

    Raises:
        RunError: the other end is gone or silent (from the transport).
    """
    if first:
        figures = _send_side(line, device)
        _receive_side(line, device)
    else:
        _receive_side(line, device)
        figures = _send_side(line, device)
    return figures


def _word(value: int = 0) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64)


def _order(line: Line, size: int) -> None:
    """Tells the receiving side what comes next, and waits until it has posted its receive."""
    go = line.recv(_word(), _GO)
    line.send(_word(size), _ORDER).wait()
    go.wait()


def _send_side(line: Line, device: str) -> LinkFigures:
    round_trip_s = _pings(line)
    size = FIRST_BYTES
    times = {size: [_trial(line, size, device)]}
    while True:
        net_s = max(times[size][-1] - round_trip_s, 1e-6)
        if net_s >= ENOUGH_S or size >= LARGEST_BYTES:
            break
        wanted = int(size * min(8.0, max(2.0, 1.2 * ENOUGH_S / net_s)))
        size = min(LARGEST_BYTES, wanted // 4096 * 4096)
        times[size] = [_trial(line, size, device)]
    small = max(4096, size // 4)
    large_s = _trials(line, size, device, times[size])
    small_s = _trials(line, small, device, times.get(small, []))
    line.send(_word(_END), _ORDER).wait()
    return LinkFigures(round_trip_s / 2, fit_bandwidth(small, small_s, size, large_s, round_trip_s))


def fit_bandwidth(
    small: int, small_s: Sequence[float], large: int, large_s: Sequence[float], round_trip_s: float
) -> float:
    """Bytes per second from the times of two sizes; where noise eats the difference, from the larger."""
    large_best, small_best = min(large_s), min(small_s)
    between_s = large_best - small_best
    alone_s = large_best - round_trip_s
    if between_s > 0.25 * large_best:
        return (large - small) / between_s
    if alone_s > 0.25 * large_best:
        return large / alone_s
    return large / large_best


def steady(times: Sequence[float]) -> bool:
    """Whether there are two, and the two shortest agree."""
    best = sorted(times)[:2]
    return len(best) == 2 and best[1] <= best[0] * (1 + AGREE)


def _trials(line: Line, size: int, device: str, times: Sequence[float]) -> list[float]:
    """Trials of one size, those had already among them, until the shortest is one that comes again."""
    found, begun = list(times), time.perf_counter()
    while len(found) < MOST_TRIALS and not steady(found):
        if len(found) >= TRIALS and time.perf_counter() - begun > TRIALS_BUDGET_S:
            break
        found.append(_trial(line, size, device))
    return found


def _pings(line: Line) -> float:
    """Shortest round trip, seconds."""
    _order(line, _PING)
    times: list[float] = []
    start = time.perf_counter()
    total = BURSTS * BURST
    for number in range(total):
        if number % BURST == 0:
            time.sleep(REST_S)
        last = number == total - 1 or (number >= BURST and time.perf_counter() - start > PING_BUDGET_S)
        answer = line.recv(_word(), _ACK)
        before = time.perf_counter()
        sent = line.send(_word(1 if last else 0), _DATA)
        answer.wait()
        times.append(time.perf_counter() - before)
        sent.wait()
        if last:
            break
    return min(times)


def _trial(line: Line, size: int, device: str) -> float:
    """Seconds from sending one message until the word that it is there."""
    payload = torch.zeros(size, dtype=torch.uint8, device=device)
    _order(line, size)
    answer = line.recv(_word(), _ACK)
    before = time.perf_counter()
    sent = line.send(payload, _DATA)
    answer.wait()
    passed_s = time.perf_counter() - before
    sent.wait()
    return passed_s


def _receive_side(line: Line, device: str) -> None:
    while True:
        order = _word()
        line.recv(order, _ORDER).wait()
        size = int(order.item())
        if size == _END:
            return
        if size == _PING:
            _answer_pings(line)
            continue
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        data = line.recv(buffer, _DATA)
        line.send(_word(), _GO).wait()
        data.wait()
        line.send(_word(), _ACK).wait()


def _answer_pings(line: Line) -> None:
    """Each receive is posted before the answer to the one before goes out."""
    word = _word()
    data = line.recv(word, _DATA)
    line.send(_word(), _GO).wait()
    while True:
        data.wait()
        last = bool(word.item())
        if not last:
            word = _word()
            data = line.recv(word, _DATA)
        line.send(_word(), _ACK).wait()
        if last:
            return
