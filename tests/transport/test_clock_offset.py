"""Two ranks' clocks compared over a real pair, with clocks that are far apart and go unequally fast."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from skyctl.remote.credentials import make_tls_certificate
from skyctl.transport import clock_offset
from skyctl.transport.peer_connection import PeerConnection
from skyctl.transport.tls_identity import TlsIdentity

Clock = Callable[[], float]


@pytest.fixture(params=["clear", "tls"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[PeerConnection, PeerConnection]]:
    """Both ends of one pair, in this process."""
    identity = TlsIdentity.from_credentials(make_tls_certificate()) if request.param == "tls" else None
    first, second = (PeerConnection(f"rank {n}", 30.0, secret="s", identity=identity) for n in (1, 0))
    port = first.listen("127.0.0.1")
    accepting = threading.Thread(target=first.accept, args=(30.0,))
    accepting.start()
    try:
        second.connect("127.0.0.1", port, timeout_s=30.0)
        accepting.join()
        yield first, second
    finally:
        first.close()
        second.close()


def compare(
    ends: tuple[PeerConnection, PeerConnection], asked: Clock, asking: Clock
) -> clock_offset.ClockOffset:
    answering = threading.Thread(target=clock_offset.answer_clock_requests, args=(ends[0], asked))
    answering.start()
    found = clock_offset.measure_clock_offset(ends[1], asking)
    answering.join()
    return found


def test_an_offset_is_found_within_the_stated_error(ends: tuple[PeerConnection, PeerConnection]) -> None:
    for offset_s in (0.0, 5.0, -3600.0):
        found = compare(ends, lambda ahead=offset_s: time.perf_counter() + ahead, time.perf_counter)
        assert found.error_s > 0
        assert abs(found.offset_s - offset_s) <= found.error_s + 1e-9
        assert found.at_s <= time.perf_counter()


def test_with_the_offset_at_both_ends_a_drift_is_taken_out(
    ends: tuple[PeerConnection, PeerConnection],
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


def test_a_slow_link_is_asked_less_often(
    ends: tuple[PeerConnection, PeerConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_offset, "ROUND_TIME_LIMIT_S", 0.0)
    calls: list[float] = []

    def counted() -> float:
        calls.append(0.0)
        return time.perf_counter()

    compare(ends, time.perf_counter, counted)
    assert len(calls) == 2 * clock_offset.MIN_ROUNDS
