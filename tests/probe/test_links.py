"""The tournament, and the measurement over a real pair on loopback."""

import itertools
import threading

import pytest
import torch

from skyctl.errors import SkyctlError
from skyctl.probe.links import again
from skyctl.probe.node import link
from skyctl.probe.node.link import LinkFigures, fit_bandwidth, measure
from skyctl.probe.rounds import rounds
from skyctl.records.profile import LinkProfile
from skyctl.transport.pair import Pair


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8, 13])
def test_every_pair_once_in_rounds_of_disjoint_pairs(count: int) -> None:
    schedule = rounds(list(range(count)))
    met = [frozenset(pair) for pairs in schedule for pair in pairs]
    assert sorted(met, key=sorted) == sorted(
        (frozenset(p) for p in itertools.combinations(range(count), 2)), key=sorted
    )
    for pairs in schedule:
        players = [player for pair in pairs for player in pair]
        assert len(set(players)) == len(players)
    assert len(schedule) == (0 if count < 2 else count - 1 + count % 2)


def test_bandwidth_leaves_out_what_does_not_grow() -> None:
    def took(size: int) -> float:
        return 0.05 + size / 2.5e6

    sizes = 250_000, 1_000_000
    times = [[took(size)] * 3 for size in sizes]
    assert fit_bandwidth(sizes[0], times[0], sizes[1], times[1], 0.05) == pytest.approx(2.5e6)


def test_a_link_too_fast_for_the_difference_is_still_positive() -> None:
    assert fit_bandwidth(100, [0.01], 400, [0.011], 0.002) == pytest.approx(400 / 0.009)
    assert fit_bandwidth(100, [0.02], 400, [0.01], 0.02) == pytest.approx(400 / 0.01)


def test_both_directions_over_a_real_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "ENOUGH_S", 0.005)
    torch.set_num_threads(1)
    ends = Pair("second", 20.0, secret="s"), Pair("first", 20.0, secret="s")
    port = ends[0].listen("127.0.0.1")
    found: dict[int, LinkFigures | SkyctlError] = {}

    def run(which: int) -> None:
        try:
            if which == 0:
                ends[0].accept(20.0)
            else:
                ends[1].connect("127.0.0.1", port, "127.0.0.1", 20.0)
            found[which] = measure(ends[which], first=which == 0)
            ends[which].close(politely=True)
        except SkyctlError as exc:
            found[which] = exc
        finally:
            ends[which].close()

    threads = [threading.Thread(target=run, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    for which in (0, 1):
        figures = found[which]
        assert isinstance(figures, LinkFigures), figures
        assert figures.latency_s > 0
        assert figures.bandwidth_bytes_per_s > 0


def _link(source: str, target: str, mbit: float | None) -> LinkProfile:
    if mbit is None:
        return LinkProfile(source=source, target=target, error="refused")
    return LinkProfile(source=source, target=target, latency_s=0.001, bandwidth_bytes_per_s=mbit * 125_000)


def test_pairs_that_may_have_shared_an_uplink_are_measured_again() -> None:
    """a, b in one site, c, d in another; both crossings of a round got half of 20 Mbit/s."""
    rates = {("a", "b"): 100, ("c", "d"): 100, ("a", "c"): 20, ("b", "d"): 20, ("a", "d"): 10, ("b", "c"): 10}
    links = [_link(*ends, rate) for pair, rate in rates.items() for ends in (pair, pair[::-1])]
    found = again(links)
    assert set(found) == {("a", "c"), ("b", "d"), ("a", "d"), ("b", "c")}
    assert set(found[:2]) == {("a", "d"), ("b", "c")}


def test_a_slow_node_is_slow_with_everybody_and_is_not_measured_again() -> None:
    links = [_link(*ends, 20) for ends in (("a", "s"), ("s", "a"), ("b", "s"), ("s", "b"))]
    links += [_link("a", "b", 100), _link("b", "a", 100), _link("s", "s", 1), _link("b", "x", None)]
    assert again(links) == []
