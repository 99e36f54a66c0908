"""Two ranks' clocks compared over a real pair, with clocks that are far apart and go unequally fast."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from skyctl.remote.credentials import make_tls_certificate
from skyctl.transport.peer_connection import PeerConnection
from skyctl.transport.process_group import SkyctlProcessGroup
from skyctl.worker.peer import Peer
from skyctl.worker.trace import clock_offset

Clock = Callable[[], float]


@pytest.fixture(params=["clear", "tls"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Peer, Peer]]:
    """Both ends of one pair, in this process."""
    identity = make_tls_certificate() if request.param == "tls" else None
    first, second = (PeerConnection(f"rank {n}", 30.0, secret="s", identity=identity) for n in (1, 0))
    port = first.listen("127.0.0.1")
    accepting = threading.Thread(target=first.accept, args=(30.0,))
    accepting.start()
    try:
        second.connect("127.0.0.1", port, timeout_s=30.0)
        accepting.join()
        yield Peer(SkyctlProcessGroup(0, 2, {1: first}), 1), Peer(SkyctlProcessGroup(1, 2, {0: second}), 0)
    finally:
        first.close()
        second.close()


def compare(ends: tuple[Peer, Peer], asked: Clock, asking: Clock) -> clock_offset.ClockOffset:
    answering = threading.Thread(target=clock_offset.answer_clock_requests, args=(ends[0], asked))
    answering.start()
    offset = clock_offset.measure_clock_offset(ends[1], asking)
    answering.join()
    return offset


def test_an_offset_is_found_within_the_stated_error(ends: tuple[Peer, Peer]) -> None:
    for offset_s in (0.0, 5.0, -3600.0):
        offset = compare(ends, lambda ahead=offset_s: time.perf_counter() + ahead, time.perf_counter)
        assert offset.error_s > 0
        assert abs(offset.offset_s - offset_s) <= offset.error_s + 1e-9
        assert offset.at_s <= time.perf_counter()


def test_with_the_offset_at_both_ends_a_drift_is_taken_out(
    ends: tuple[Peer, Peer],
) -> None:
    from skyctl.compare.timeline import align_clocks

    zero_s = time.perf_counter()

    def theirs() -> float:
        return 100.0 + (time.perf_counter() - zero_s) * 1.01

    def ours() -> float:
        return -7.0 + (time.perf_counter() - zero_s) * 0.97

    start = compare(ends, theirs, ours)
    moments = []
    for _ in range(5):
        time.sleep(0.02)
        moments.append((ours(), theirs(), ours()))
    end = compare(ends, theirs, ours)
    clock = align_clocks([{}, {"start": start._asdict(), "end": end._asdict()}])[1]
    assert clock.error_s == max(start.error_s, end.error_s)
    for before_s, their_s, after_s in moments:
        near_s = clock.error_s + 2e-4
        assert clock.to_first(before_s) - near_s <= their_s <= clock.to_first(after_s) + near_s


def test_a_slow_link_is_asked_less_often(ends: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_offset, "ROUND_TIME_LIMIT_S", 0.0)
    calls: list[float] = []

    def counted() -> float:
        calls.append(0.0)
        return time.perf_counter()

    compare(ends, time.perf_counter, counted)
    assert len(calls) == 2 * clock_offset.MIN_ROUNDS


def test_both_ends_know_how_far_they_are(ends: tuple[Peer, Peer]) -> None:
    other = threading.Thread(target=ends[1].measure_latency, args=(3,))
    other.start()
    ends[0].measure_latency(3)
    other.join()
    assert ends[0].latency_s == ends[1].latency_s > 0
