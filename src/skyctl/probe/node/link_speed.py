"""Latency and bandwidth between two nodes, over the very transport that training uses.

Both ends run ``measure`` on a connected pair; each reports the direction in which it sends.

* ``latency_s``: half the shortest round trip of 8-byte messages whose receives are posted ahead, which the
  first end measures for both. They go in small bursts with a rest before each: a process that a CPU quota has
  held back may run again after it, so that its waits are not taken for the network's.
* ``bandwidth_bytes_per_s``: messages sent one behind the other, and what their receiver saw come in a second
  once the stream was under way (TCP's start and a bucket's burst left out). The bytes adapt to the link,
  so a slow one takes hardly more time. A stream that is as fast in its first half as in its second has shown
  it. Others are repeated until the two fastest agree: lost packets and waits for a processor only take away,
  and TCP may need many round trips to fill a long link.
* ``send_byte_s``, ``receive_byte_s``: CPU time of this process for each byte of these streams. The slower a
  link, the more it is: data come in smaller pieces, and each wakes the process up.

``run_hub`` and ``exchange_flows``: several flows at once between a hub and its peers, as training sends them.
Every flow is a number of messages of one size, all of its receives posted beforehand; its receiver notes
when each was there. The launcher judges what comes of the times (``probe/contention.py``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Protocol

import torch

from skyctl.errors import RunError, SkyctlError
from skyctl.transport.peer_connection import FIRST_TAG, PeerConnection
from skyctl.transport.work import Work

BURSTS = 6
BURST = 3
REST_S = 0.02
PING_BUDGET_S = 0.6
MESSAGES = 64
FIRST_BYTES = 48 << 10
LARGEST_BYTES = 32 << 20
GROWTH = 12.0
SETTLE_S = 0.1
MEASURE_S = 0.3
SETTLE_TRIPS, MEASURE_TRIPS = 6, 3
"""At least so many round trips are left out, and measured."""
MOST_STREAMS = 8
RATE_TOLERANCE = 0.03
MIN_HALF = 4
"""Arrivals in half a stream at least for it to be judged by its halves; what comes together is one."""
TOGETHER = 0.2
"""Messages come together where less than this part of their mean distance lies between them: a kernel hands
up to 64 KiB at a time to a shaper, which is a tenth of a second on a link of 5 Mbit/s."""
BUDGET_S = 1.5
BUDGET_TRIPS = 45
"""Streams that do not agree are repeated for so long, in seconds or round trips, whichever is longer."""

_ORDER, _GO, _DATA, _ACK = FIRST_TAG, FIRST_TAG + 1, FIRST_TAG + 2, FIRST_TAG + 3
_END = 0
"""And below: less so many nanoseconds of a round trip."""
_PING = 1


class PointToPoint(Protocol):
    """The connection that is measured: a ``PeerConnection`` (a test's fake has just these methods)."""

    def send(self, tensor: torch.Tensor, tag: int) -> Work:
        """Starts sending a tensor to the other end."""

    def recv(self, tensor: torch.Tensor, tag: int) -> Work:
        """Starts receiving a tensor from the other end."""


@dataclass(frozen=True)
class LinkSpeed:
    """The direction in which this end sends, and CPU seconds of this end for a byte sent and one received."""

    latency_s: float
    bandwidth_bytes_per_s: float
    send_byte_s: float
    receive_byte_s: float


class _ByteCost:
    """The CPU time of this process that streams took."""

    def __init__(self) -> None:
        self._cpu_s = 0.0
        self._bytes = 0

    @contextmanager
    def stream(self, message_bytes: int) -> Iterator[None]:
        """Counts one stream of messages of that size."""
        begun_s = time.process_time()
        yield
        self._cpu_s += time.process_time() - begun_s
        self._bytes += message_bytes * MESSAGES

    @property
    def byte_s(self) -> float:
        """Seconds a byte, of all streams: most bytes are the last ones'."""
        return self._cpu_s / self._bytes if self._bytes else 0.0


def measure_link(line: PointToPoint, first: bool, device: str = "cpu") -> LinkSpeed:
    """Both directions in turn; both ends must call it, exactly one with ``first``.

    Args:
        device: where messages are held, as training's are (an accelerator's way through host memory counts).

    Raises:
        RunError: the other end is gone or silent (from the transport).
    """
    sending, receiving = _ByteCost(), _ByteCost()
    round_trip_s = _measure_round_trip(line) if first else _receive_side(line, device, receiving)
    rate = _measure_rate(line, round_trip_s, device, sending)
    line.send(_word(_END - round(round_trip_s * 1e9)), _ORDER).wait()
    if first:
        _receive_side(line, device, receiving)
    return LinkSpeed(round_trip_s / 2, rate, sending.byte_s, receiving.byte_s)


def _word(value: int = 0) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64)


def _order(line: PointToPoint, size: int) -> None:
    """Tells the receiving side what comes next, and waits until it has posted its receive."""
    go = line.recv(_word(), _GO)
    line.send(_word(size), _ORDER).wait()
    go.wait()


def _measure_rate(line: PointToPoint, round_trip_s: float, device: str, cost: _ByteCost) -> float:
    """The rate measured, in bytes per second."""
    settle_s = max(SETTLE_S, SETTLE_TRIPS * round_trip_s)
    wanted_s = settle_s + max(MEASURE_S, MEASURE_TRIPS * round_trip_s)
    budget_s = max(BUDGET_S, BUDGET_TRIPS * round_trip_s)
    begun = time.perf_counter()
    size = FIRST_BYTES // MESSAGES
    rates: list[float] = []
    for _ in range(MOST_STREAMS):
        arrivals = _send_stream(line, size, device, cost)
        rate = stream_rate(arrivals, size, settle_s)
        wanted_s = max(wanted_s, min(budget_s, settle_s + 2 * MIN_HALF * longest_pause_s(arrivals)))
        if arrivals[-1] >= 0.6 * wanted_s or size >= LARGEST_BYTES // MESSAGES:
            rates.append(rate)
            if rate == max(rates) and is_steady(arrivals, settle_s):
                return rate
            if rates_agree(rates) or time.perf_counter() - begun > budget_s:
                break
        grown = min(max([rate, *rates]) * wanted_s, size * MESSAGES * GROWTH, LARGEST_BYTES)
        size = max(size, int(grown / MESSAGES))
    best = sorted(rates, reverse=True)[:2] or [rate]
    return sum(best) / len(best) if rates_agree(rates) else best[-1]


def rates_agree(rates: Sequence[float]) -> bool:
    """Whether there are two, and the two fastest agree."""
    best = sorted(rates, reverse=True)[:2]
    return len(best) == 2 and best[0] <= best[1] * (1 + RATE_TOLERANCE)


@dataclass(frozen=True)
class Arrival:
    """Messages that came together: when, and how many had come by then, the first of the stream included."""

    at_s: float
    messages: int


def join_arrivals(arrivals_s: Sequence[float]) -> list[Arrival]:
    """A stream's arrivals, those that came together as one."""
    apart_s = TOGETHER * (arrivals_s[-1] - arrivals_s[0]) / max(1, len(arrivals_s) - 1)
    arrivals: list[Arrival] = []
    for number, at_s in enumerate(arrivals_s):
        if arrivals and at_s - arrivals[-1].at_s <= apart_s:
            arrivals.pop()
        arrivals.append(Arrival(at_s, number + 1))
    return arrivals


def longest_pause_s(arrivals_s: Sequence[float]) -> float:
    """The longest time between two arrivals of a stream, in seconds."""
    times = [arrival.at_s for arrival in join_arrivals(arrivals_s)]
    return max((after - before for before, after in pairwise(times)), default=0.0)


def is_steady(arrivals_s: Sequence[float], settle_s: float) -> bool:
    """Whether both halves of a stream after its first ``settle_s`` seconds had the same rate.

    Not where round trips are long, as ``SETTLE_TRIPS`` has it: TCP may then still become faster.

    Args:
        arrivals_s: when each message had come, in order.
    """
    settled = [arrival for arrival in _whole_arrivals(arrivals_s) if arrival.at_s > arrivals_s[0] + settle_s]
    half = (len(settled) - 1) // 2
    if settle_s > SETTLE_S or half < MIN_HALF:
        return False
    first, middle, last = settled[-1 - 2 * half], settled[-1 - half], settled[-1]
    rates = [_rate_between(first, middle), _rate_between(middle, last)]
    unsure = (
        last.messages - first.messages > 2 * half
    )  # where messages come together one may be in either half
    return max(rates) <= min(rates) * (1 + max(RATE_TOLERANCE, 2 * unsure / (last.messages - first.messages)))


def stream_rate(arrivals_s: Sequence[float], message_bytes: int, settle_s: float) -> float:
    """Bytes per second of a stream after its first ``settle_s`` seconds, at most half of it.

    The median of the rates from each arrival of the first half of what is left to the one half as many
    arrivals behind it: what came late behind a lost packet or a wait for a processor moves a few of them.

    Args:
        arrivals_s: when each message had come, in order.
    """
    arrivals = _whole_arrivals(arrivals_s)
    settled_s = min(arrivals_s[0] + settle_s, (arrivals_s[0] + arrivals[-1].at_s) / 2)
    before = max((number for number, arrival in enumerate(arrivals) if arrival.at_s <= settled_s), default=0)
    settled = arrivals[before:]
    half = len(settled) // 2
    rates = [_rate_between(*ends) * message_bytes for ends in zip(settled, settled[half:], strict=False)]
    return median(rates) if half else len(arrivals_s) * message_bytes / max(arrivals_s[-1], 1e-6)


def _whole_arrivals(arrivals_s: Sequence[float]) -> list[Arrival]:
    """The arrivals but the last, which may be shorter than the others and had to wait as long."""
    arrivals = join_arrivals(arrivals_s)
    return arrivals[:-1] if len(arrivals) > 2 else arrivals


def _rate_between(earlier: Arrival, later: Arrival) -> float:
    """Messages per second that came after the first arrival, up to the other."""
    return (later.messages - earlier.messages) / max(1e-6, later.at_s - earlier.at_s)


def _measure_round_trip(line: PointToPoint) -> float:
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


def _send_stream(line: PointToPoint, size: int, device: str, cost: _ByteCost) -> list[float]:
    """Sends ``MESSAGES`` of that size; when each was there, in seconds by the receiver's clock."""
    payload = torch.zeros(size, dtype=torch.uint8, device=device)
    _order(line, size)
    arrivals = torch.zeros(MESSAGES, dtype=torch.float64)
    answer = line.recv(arrivals, _ACK)
    with cost.stream(size):
        sends = [line.send(payload, _DATA) for _ in range(MESSAGES)]
        for sent in sends:
            sent.wait()
        answer.wait()
    return [float(at) for at in arrivals]


def _receive_side(line: PointToPoint, device: str, cost: _ByteCost) -> float:
    """Does as the other end says, until that says how many seconds a round trip takes."""
    begun = time.perf_counter()
    while True:
        order = _word()
        line.recv(order, _ORDER).wait()
        size = int(order.item())
        if size <= _END:
            return min((_END - size) / 1e9, time.perf_counter() - begun)
        if size == _PING:
            _answer_pings(line)
            continue
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        # All into one buffer: nobody reads it, and nothing has to be posted while the stream runs.
        receives = [line.recv(buffer, _DATA) for _ in range(MESSAGES)]
        line.send(_word(), _GO).wait()
        with cost.stream(size):
            start, arrivals = time.perf_counter(), []
            for data in receives:
                data.wait()
                arrivals.append(time.perf_counter() - start)
        line.send(torch.tensor(arrivals, dtype=torch.float64), _ACK).wait()


def _answer_pings(line: PointToPoint) -> None:
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


# Several flows at once


@dataclass(frozen=True)
class FlowSpec:
    """The messages that one pair carries, as this end sees them. Bytes are a message's, at least 1."""

    messages: int
    send_bytes: int
    receive_bytes: int


def exchange_flows(
    line: PointToPoint, flows: FlowSpec, go: Callable[[], float] | None, device: str = "cpu"
) -> list[float]:
    """Sends and receives all messages of a pair at once; the hub's end is the one with ``go``.

    Args:
        go: waits for the hub's other pairs; gives the time that they all count from.
        device: where messages are held, as training's are.

    Returns:
        Seconds from the go (here: when it was given, or heard) until each message had come, in order.

    Raises:
        RunError: the other end is gone or silent (from the transport).
    """
    incoming = torch.empty(flows.receive_bytes, dtype=torch.uint8, device=device)
    outgoing = torch.zeros(flows.send_bytes, dtype=torch.uint8, device=device)
    # All into one buffer: nobody reads it, and nothing has to be posted while the flows run.
    receives = [line.recv(incoming, _DATA) for _ in range(flows.messages)]
    if go is None:
        heard = line.recv(_word(), _GO)
        line.send(_word(), _ORDER).wait()
        heard.wait()
        start = time.perf_counter()
    else:
        line.recv(_word(), _ORDER).wait()
        start = go()
        line.send(_word(), _GO).wait()
    sends = [line.send(outgoing, _DATA) for _ in range(flows.messages)]
    arrivals = []
    for work in receives:
        work.wait()
        arrivals.append(time.perf_counter() - start)
    for work in sends:
        work.wait()
    return arrivals


def run_hub(
    pairs: Sequence[tuple[PeerConnection, FlowSpec]],
    timeout_s: float,
    device: str = "cpu",
    hold: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """The hub's end: waits for its peers, then all flows at once, a thread a pair.

    Args:
        pairs: each one listening already.
        timeout_s: how long the peers may take to connect.
        hold: called once when all are ready; the flows begin when it returns.

    Returns:
        By peer, when each of its messages had come.

    Raises:
        SkyctlError: a peer did not come, or a flow broke; the first cause.
    """
    begun: list[float] = []

    def begin() -> None:
        hold()
        begun.append(time.perf_counter())

    together = threading.Barrier(len(pairs), action=begin)
    arrivals: dict[str, list[float]] = {}
    errors: list[SkyctlError] = []

    def go() -> float:
        together.wait(timeout_s)
        return begun[0]

    def run(pair: PeerConnection, flows: FlowSpec) -> None:
        try:
            pair.accept(timeout_s)
            arrivals[pair.peer] = exchange_flows(pair, flows, go, device)
            pair.close(graceful=True)
        except threading.BrokenBarrierError:
            pass  # another pair's error, and that one is told
        except SkyctlError as exc:
            errors.append(exc)
        except (RuntimeError, OSError, ValueError) as exc:
            errors.append(RunError(f"the flows with {pair.peer} failed: {type(exc).__name__}: {exc}"))
        finally:
            if pair.peer not in arrivals:
                together.abort()
            pair.close()

    threads = [threading.Thread(target=run, args=entry, name=f"line {entry[0].peer}") for entry in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if len(arrivals) < len(pairs):
        raise RunError(f"the peers were not all ready within {timeout_s:.0f} s")
    return arrivals
