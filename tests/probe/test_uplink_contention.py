"""The uplinks that sites share: which flows are tried, what is made of them, and how a trial can fail."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator
from typing import Any

import pytest

from skyctl.probe.contention import measure_uplinks, uplink_trials
from skyctl.probe.device_probes import DeviceProbe, DeviceProbes
from skyctl.probe.link_measurement import measure_links
from skyctl.records.cluster import Node
from skyctl.records.profile import LinkProfile, SiteProfile, UplinkProfile

MBIT = 125_000.0
FACTS = {"event": "facts", "device": "cpu:0"}


def network(sites: str, nodes: int, uplinks: dict[str, float]) -> dict[tuple[str, str], LinkProfile]:
    """Nodes of 100 Mbit/s; between sites what both uplinks (Mbit/s) let through."""
    names = [f"{site}{number}" for site in sites for number in range(nodes)]

    def rate(a: str, b: str) -> float:
        most = min(uplinks.get(a[0], 100.0), uplinks.get(b[0], 100.0))
        return MBIT * (100.0 if a[0] == b[0] else min(100.0, most))

    return {
        (a, b): LinkProfile(
            source=a,
            target=b,
            latency_s=0.0001 if a[0] == b[0] else 0.005,
            bandwidth_bytes_per_s=rate(a, b),
        )
        for a, b in itertools.permutations(names, 2)
    }


def profiles(links: dict[tuple[str, str], LinkProfile]) -> list[SiteProfile]:
    names = list(dict.fromkeys(a for a, _ in links))
    groups = itertools.groupby(names, key=lambda name: name[0])
    return [SiteProfile(name=site, nodes=tuple(group)) for site, group in groups]


def test_flows_are_disjoint_and_meet_at_one_site_only() -> None:
    links = network("abc", 2, {"b": 20})
    trials = uplink_trials(profiles(links), links)
    assert [(t.site, t.direction) for t in trials] == [(s, d) for s in "abc" for d in ("out", "in")]
    for trial in trials:
        ends = [name for way in trial.flows for name in way]
        assert len(set(ends)) == 4
        mine, other = (0, 1) if trial.direction == "out" else (1, 0)
        assert {way[mine][0] for way in trial.flows} == {trial.site}
        assert len({way[other][0] for way in trial.flows}) == 2


def test_two_sites_are_tried_once_and_too_few_nodes_not_at_all() -> None:
    links = network("ab", 3, {})
    assert [(t.site, t.direction) for t in uplink_trials(profiles(links), links)] == [
        ("a", "out"),
        ("a", "in"),
    ]
    single_site = network("a", 4, {})
    assert uplink_trials(profiles(single_site), single_site) == []
    singles = network("abcd", 1, {})
    assert uplink_trials(profiles(singles), singles) == []
    few = [SiteProfile(name="a", nodes=("a0", "a1")), SiteProfile(name="b", nodes=("b0",))]
    assert uplink_trials(few, network("ab", 2, {})) == []


# The launcher's side, against processes that follow a script


class Wires:
    """Uplinks that are really shared: a flow's rate depends on the flows under way."""

    def __init__(self, links: dict[tuple[str, str], LinkProfile], uplinks: dict[str, float]) -> None:
        self.links, self.uplinks = links, uplinks
        self.flows: dict[str, str] = {}

    def rate(self, source: str, target: str) -> float:
        most = self.links[source, target].bandwidth_bytes_per_s or 0.0
        for site in (source[0], target[0]):
            if site in self.uplinks:
                crossing = [way for way in self.flows.items() if (way[0][0] == site) != (way[1][0] == site)]
                most = min(most, self.uplinks[site] * MBIT / max(1, len(crossing)))
        return most


class Script:
    """A node's process."""

    def __init__(self, name: str, wires: Wires, fault: str = "") -> None:
        self.name, self.wires, self.fault = name, wires, fault
        self.events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.asked: dict[str, Any] = {}
        self.peers: list[Script] = []

    def send(self, message: dict[str, Any], body: bytes = b"") -> None:
        if self.fault == "dies":
            self.events.put(None)
        if self.fault in ("dies", "silent"):
            return
        if message["op"] == "go":
            assert self.fault != "gives up", "it waits no more"
            (pair,) = self.asked["pairs"]
            target = next(script for script in self.peers if script.name == pair["peer"])
            each_s = pair["send_bytes"] / self.wires.rate(self.name, target.name)
            arrivals = [each_s * (number + 1) for number in range(pair["messages"])]
            answer = {"event": "line", "hub": self.name}
            self.events.put(answer | {"arrivals": {target.name: arrivals}})
            if target.fault == "refuses":
                target.events.put(answer | {"error": "no route"})
            else:
                target.events.put(answer | {"arrivals": {self.name: arrivals}})
            return
        self.asked = message
        if message["role"] == "hub":
            assert message["hold"]
            if not self.wires.flows or self.name in self.wires.flows:
                self.wires.flows = {}
            self.wires.flows[self.name] = message["pairs"][0]["peer"]
            event = {"event": "line-listening", "hub": self.name, "address": "192.0.2.1", "ports": [5]}
            self.events.put(event)
            if self.fault == "gives up":
                self.events.put({"event": "line", "hub": self.name, "error": "not ready in time"})
        else:
            hub = next(script for script in self.peers if script.name == message["hub"])
            hub.events.put({"event": "line-ready", "hub": hub.name})

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes] | None:
        event = self.events.get()
        return None if event is None else (event, b"")

    def kill(self) -> None:
        self.events.put(None)


@pytest.fixture
def fleets() -> Iterator[list[DeviceProbes]]:
    started: list[DeviceProbes] = []
    yield started
    for probes in started:
        for member in probes.members:
            member.task.kill()


def play(
    fleets: list[DeviceProbes], sites: str, uplinks: dict[str, float], *, nodes: int = 2, **faults: str
) -> tuple[list[UplinkProfile], dict[str, str], DeviceProbes]:
    links = network(sites, nodes, uplinks)
    wires = Wires(links, uplinks)
    probes = DeviceProbes()
    fleets.append(probes)
    names = list(dict.fromkeys(a for a, _ in links))
    scripts = [Script(name, wires, faults.get(name, "")) for name in names]
    for script in scripts:
        script.peers = scripts
        member = DeviceProbe(Node(name=script.name, transport="local"), "192.0.2.1", script, facts=FACTS)
        probes.add(member)
    limit_s = 0.2 if faults else 20.0  # some wait for those that have one
    progress: list[tuple[int, int]] = []
    shared, reasons = measure_uplinks(
        probes,
        dict.fromkeys(names, "192.0.2.1"),
        list(links.values()),
        profiles(links),
        lambda done, of: progress.append((done, of)),
        connect_s=limit_s,
        transfer_s=limit_s,
    )
    assert progress == [(number, len(progress)) for number in range(len(progress))]
    return shared, reasons, probes


def test_the_site_that_shares_is_named_with_what_it_shares(fleets: list[DeviceProbes]) -> None:
    shared, reasons, _ = play(fleets, "abc", {"b": 20})
    assert not reasons
    assert [(uplink.site, uplink.direction) for uplink in shared] == [("b", "out"), ("b", "in")]
    for uplink in shared:
        assert uplink.bandwidth_bytes_per_s == pytest.approx(20 * MBIT, rel=0.01)
        assert len(uplink.pairs) == 2


def test_one_path_between_two_sites_is_named_once(fleets: list[DeviceProbes]) -> None:
    shared, reasons, _ = play(fleets, "ab", {"b": 20})
    assert not reasons
    assert [(uplink.site, uplink.direction) for uplink in shared] == [("a", "out"), ("a", "in")]


def test_where_nothing_is_shared_nothing_is_said(fleets: list[DeviceProbes]) -> None:
    shared, reasons, probes = play(fleets, "abc", {}, nodes=3)
    assert (shared, reasons, probes.failures) == ([], {}, {})


@pytest.mark.parametrize(("fault", "words"), [("refuses", "no route"), ("silent", "no answer in time")])
def test_a_failed_trial_is_left_out_with_the_reason_and_fails_no_node(
    fleets: list[DeviceProbes], fault: str, words: str
) -> None:
    shared, reasons, probes = play(fleets, "ab", {"b": 20}, b0=fault)
    assert not any(uplink.direction == "out" for uplink in shared)
    assert words in reasons["a"] or "answers no more" in reasons["a"]
    assert not probes.failures


def test_nobody_is_told_to_go_once_a_source_has_given_up(fleets: list[DeviceProbes]) -> None:
    shared, reasons, probes = play(fleets, "ab", {"b": 20}, a0="gives up")
    assert shared == []
    assert reasons
    assert not probes.failures


def test_a_process_that_ends_is_its_nodes_failure_as_ever(fleets: list[DeviceProbes]) -> None:
    _, reasons, probes = play(fleets, "ab", {"b": 20}, b1="dies")
    assert list(probes.failures) == ["b1"]
    assert reasons


def test_no_links_are_measured_where_none_are_asked_for() -> None:
    assert measure_links(DeviceProbes(), {}, how="none") == ([], [])
