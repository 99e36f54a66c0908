"""The tournament, and the measurement over a real pair on loopback."""

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from skyctl.errors import SkyctlError
from skyctl.probe.device_probes import DeviceProbe, DeviceProbes
from skyctl.probe.link_measurement import measure_links, suspect_pairs
from skyctl.probe.node import link_speed
from skyctl.probe.node.link_speed import LinkSpeed, measure_link
from skyctl.probe.pairings import round_robin
from skyctl.records.cluster import Node
from skyctl.records.profile import LinkProfile
from skyctl.transport.peer_connection import PeerConnection


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8, 13])
def test_every_pair_once_in_rounds_of_disjoint_pairs(count: int) -> None:
    schedule = round_robin(list(range(count)))
    met = [frozenset(pair) for pairs in schedule for pair in pairs]
    assert sorted(met, key=sorted) == sorted(
        (frozenset(p) for p in itertools.combinations(range(count), 2)), key=sorted
    )
    for pairs in schedule:
        players = [player for pair in pairs for player in pair]
        assert len(set(players)) == len(players)
    assert len(schedule) == (0 if count < 2 else count - 1 + count % 2)


def test_a_streams_start_is_left_out() -> None:
    slow_start = [0.1, 0.3, 0.5, *(0.5 + 0.05 * number for number in range(1, 11))]
    assert link_speed.stream_rate(slow_start, 1000, 0.4) == pytest.approx(20_000)
    assert link_speed.stream_rate(slow_start, 1000, 9.0) > 18_000  # at most half of it is left out
    stalled = [0.1 * n if n < 5 or n > 10 else 1.0 for n in range(1, 31)]
    assert link_speed.stream_rate(stalled, 1000, 0.6) == pytest.approx(10_000)  # 5 to 10 came at once, late
    assert link_speed.stream_rate([0.5, 0.5], 1000, 0.1) == pytest.approx(4_000)  # all at once


def test_a_stream_that_comes_in_bursts_is_counted_from_burst_to_burst() -> None:
    """A shaper sends 64 KiB at once and waits for as long as they should have taken; the last has fewer."""
    rate, burst, size = 600e3, 65536, 8192
    sent = [number * size // burst * burst / rate for number in range(link_speed.MESSAGES)]
    came = [0.001 + at for at in sent]
    assert link_speed.stream_rate(came[:60], size, 0.1) == pytest.approx(rate, rel=0.02)
    assert not link_speed.is_steady(came[:40], 0.1), "five bursts are too few"
    assert link_speed.longest_pause_s(came) == pytest.approx(burst / rate)


def test_the_two_fastest_streams_must_agree() -> None:
    assert not link_speed.rates_agree([100.0])
    assert link_speed.rates_agree([40.0, 100.0, 101.0])
    assert not link_speed.rates_agree([100.0, 120.0, 100.0])


class OnPaper:
    """A line whose far end is played here: messages come one behind the other at a rate, after a delay."""

    def __init__(self, rate: float, round_trip_s: float, lost: int = 0) -> None:
        self.rate, self.round_trip_s, self.lost = rate, round_trip_s, lost
        self.sizes: list[int] = []
        self.reports: list[torch.Tensor] = []

    def send(self, tensor: torch.Tensor, tag: int) -> "OnPaper":
        if tag == link_speed._ORDER and int(tensor.item()) > 1:
            self.sizes.append(int(tensor.item()))
        return self

    def recv(self, tensor: torch.Tensor, tag: int) -> "OnPaper":
        if tensor.dtype == torch.float64:
            slow = 0.5 if len(self.sizes) <= self.lost else 1.0
            each_s = self.sizes[-1] / (self.rate * slow)
            late_s = self.round_trip_s / 2
            tensor.copy_(torch.tensor([late_s + each_s * (n + 1) for n in range(link_speed.MESSAGES)]))
        return self

    def wait(self, timeout_s: float | None = None) -> None:
        """At once."""


@pytest.mark.parametrize("mbit", [1, 5, 200, 10_000])
@pytest.mark.parametrize("round_trip_s", [0.0001, 0.1])
def test_bytes_adapt_so_that_a_slow_link_takes_no_longer(mbit: int, round_trip_s: float) -> None:
    line = OnPaper(mbit * 125_000.0, round_trip_s)
    assert link_speed._measure_rate(line, round_trip_s, "cpu", link_speed._ByteCost()) == pytest.approx(
        mbit * 125_000, rel=1e-3
    )
    seconds = sum(line.sizes) * link_speed.MESSAGES / (mbit * 125_000)
    assert seconds < (0.6 if round_trip_s < 0.01 else 1.5 + 25 * round_trip_s), "a steady stream is enough"
    assert len(line.sizes) <= 6


def test_a_stream_is_judged_by_its_halves_where_it_has_some_and_tcp_is_up_to_speed() -> None:
    even = [0.02 * n for n in range(1, link_speed.MESSAGES + 1)]
    assert link_speed.is_steady(even, link_speed.SETTLE_S)
    assert not link_speed.is_steady(even, 2 * link_speed.SETTLE_S), "round trips are long"
    assert not link_speed.is_steady(even[:10], link_speed.SETTLE_S), "too few messages"
    slowed = even[:40] + [at + 0.06 for at in even[40:]]
    assert not link_speed.is_steady(slowed, link_speed.SETTLE_S)
    late_start = [at + 0.1 for at in even[:5]] + [max(at, 0.2) for at in even[5:]]
    assert link_speed.is_steady(late_start, link_speed.SETTLE_S), "what is left out does not count"


def test_streams_that_lost_packets_are_repeated() -> None:
    line = OnPaper(6e6, 0.02, lost=3)
    assert link_speed._measure_rate(line, 0.02, "cpu", link_speed._ByteCost()) == pytest.approx(6e6, rel=1e-3)


def test_both_directions_over_a_real_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_speed, "LARGEST_BYTES", 1 << 20)
    torch.set_num_threads(1)
    ends = PeerConnection("second", 20.0, secret="s"), PeerConnection("first", 20.0, secret="s")
    port = ends[0].listen("127.0.0.1")
    results: dict[int, LinkSpeed | SkyctlError] = {}

    def run(which: int) -> None:
        try:
            if which == 0:
                ends[0].accept(20.0)
            else:
                ends[1].connect("127.0.0.1", port, "127.0.0.1", 20.0)
            results[which] = measure_link(ends[which], first=which == 0)
            ends[which].close(graceful=True)
        except SkyctlError as exc:
            results[which] = exc
        finally:
            ends[which].close()

    threads = [threading.Thread(target=run, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    for which in (0, 1):
        figures = results[which]
        assert isinstance(figures, LinkSpeed), figures
        assert figures.latency_s > 0
        assert figures.bandwidth_bytes_per_s > 0
        assert 0 < figures.send_byte_s < 1e-6
        assert 0 < figures.receive_byte_s < 1e-6


def _link(source: str, target: str, mbit: float | None) -> LinkProfile:
    if mbit is None:
        return LinkProfile(source=source, target=target, error="refused")
    return LinkProfile(source=source, target=target, latency_s=0.001, bandwidth_bytes_per_s=mbit * 125_000)


def test_pairs_that_may_have_shared_an_uplink_are_measured_again() -> None:
    """a, b in one site, c, d in another; both crossings of a round got half of 20 Mbit/s."""
    rates = {("a", "b"): 100, ("c", "d"): 100, ("a", "c"): 20, ("b", "d"): 20, ("a", "d"): 10, ("b", "c"): 10}
    links = [_link(*ends, rate) for pair, rate in rates.items() for ends in (pair, pair[::-1])]
    suspects = suspect_pairs(links)
    assert set(suspects) == {("a", "c"), ("b", "d"), ("a", "d"), ("b", "c")}
    assert set(suspects[:2]) == {("a", "d"), ("b", "c")}


def test_a_slow_node_is_slow_with_everybody_and_is_not_measured_again() -> None:
    links = [_link(*ends, 20) for ends in (("a", "s"), ("s", "a"), ("b", "s"), ("s", "b"))]
    links += [_link("a", "b", 100), _link("b", "a", 100), _link("s", "s", 1), _link("b", "x", None)]
    assert suspect_pairs(links) == []


def _member(name: str, boot_id: str) -> DeviceProbe:
    return DeviceProbe(Node(name=name, transport="local"), "localhost", Task(), {"boot_id": boot_id})


class Task:
    """Nobody talks with it: rounds are played on paper."""

    def send(self, message: dict[str, Any], body: bytes = b"") -> None: ...

    def recv(self, timeout_s: float | None = None) -> None: ...

    def kill(self) -> None: ...


def test_of_one_machines_loopback_a_ring_is_measured_and_the_rest_marked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"n{number}" for number in range(8)]
    probes = DeviceProbes()
    probes.members = [_member(name, "here" if name < "n6" else "there") for name in names]
    addresses = {name: "127.0.0.1" if name < "n6" else "10.0.0.1" for name in names}
    played: list[tuple[str, str]] = []

    def paper_round(
        _probes: DeviceProbes, pairs: Sequence[tuple[DeviceProbe, DeviceProbe]], *_: object, **__: object
    ) -> dict[tuple[str, str], LinkProfile]:
        ways = [(a.node.name, b.node.name) for a, b in pairs]
        played.extend(ways)
        return {way: _link(*way, 100) for pair in ways for way in (pair, pair[::-1])}

    monkeypatch.setattr("skyctl.probe.link_measurement.measure_round", paper_round)
    links, sites = measure_links(probes, addresses, how="sites")
    here = {(link.source, link.target): link for link in links if max(link.source, link.target) < "n6"}
    assert len(here) == 6 * 5
    assert sum(not link.estimated for link in here.values()) == 2 * 6
    assert {link.bandwidth_bytes_per_s for link in here.values()} == {100 * 125_000}
    assert not any(link.estimated for link in links if min(link.source, link.target) >= "n6")
    assert [sorted(site) for site in sites] == [names]
    assert len(links) == 8 * 7
    played.clear()
    measure_links(probes, addresses, how="all")
    assert len(played) == 8 * 7 / 2
