"""A node's own line: who is asked, what is made of the times, and every way in which it can fail."""

import queue
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from skyctl.errors import RunError, SkyctlError
from skyctl.probe.concurrent_flows import LEAST_MESSAGE_BYTES, ReceivedFlow, joint_rate
from skyctl.probe.contention import (
    NODE_SIZES,
    hub_candidates,
    hub_rounds,
    measure_node_lines,
    shared_rate,
    triple_settle_s,
)
from skyctl.probe.device_probes import DeviceProbe, DeviceProbes
from skyctl.probe.node.link_speed import FlowSpec, exchange_flows, run_hub
from skyctl.probe.node.probe_order import ProbeOrder
from skyctl.records.cluster import Node
from skyctl.records.profile import LineProfile, LinkProfile
from skyctl.remote.agent_session import Session
from skyctl.remote.base import ConnectOptions
from skyctl.remote.session_factory import open_sessions
from skyctl.transport.peer_connection import PeerConnection
from skyctl.transport.transfer_errors import PeerLostError

MB = 1e6
FACTS = {"event": "facts", "device": "cpu:0"}


def links(rates: dict[str, float], latency_s: float = 0.001) -> list[LinkProfile]:
    """Between nodes that each have a line of that rate: a pair gets the lesser of the two."""
    return [
        LinkProfile(source=a, target=b, latency_s=latency_s, bandwidth_bytes_per_s=min(rates[a], rates[b]))
        for a in rates
        for b in rates
        if a != b
    ]


def by_ends(profiles: list[LinkProfile]) -> dict[tuple[str, str], LinkProfile]:
    return {(link.source, link.target): link for link in profiles}


# The decision


def test_a_line_is_shared_where_two_get_clearly_less_together() -> None:
    assert shared_rate(2.4, [2.0, 2.0], 2.0) == 2.4
    assert shared_rate(3.4, [2.0, 2.0], 2.0) is None
    assert shared_rate(4.4, [2.0, 2.0], 2.0) is None


def test_a_line_is_no_slower_than_what_it_carried_alone() -> None:
    assert shared_rate(1.7, [2.0, 2.0], 2.1) == 2.1
    assert shared_rate(8.0, [10.0, 1.0], 10.0) is None  # one fast peer and noise say nothing of sharing


def test_only_the_time_when_all_flows_ran_counts() -> None:
    """Ten messages of 1 byte at 10 a second for 1 s, beside 20 at 5 a second: 15 together, then 5."""
    fast, slow = (
        ReceivedFlow([0.1 * i for i in range(1, 11)], 1),
        ReceivedFlow([0.2 * i for i in range(1, 21)], 1),
    )
    assert joint_rate([fast, slow], 0.1) == pytest.approx(15.0)
    assert joint_rate([fast, slow], 100.0) == pytest.approx(15.0)  # at most half is left out
    assert joint_rate([fast], 0.0) == pytest.approx(10.0)


def test_a_slow_start_is_left_out() -> None:
    late = ReceivedFlow([0.3, *(0.3 + 0.1 * i for i in range(1, 8))], 100)
    assert joint_rate([late], 0.3) == pytest.approx(1000.0)


def test_no_time_together_is_no_figure() -> None:
    assert joint_rate([ReceivedFlow([], 5), ReceivedFlow([0.1], 5)], 0.1) is None
    assert joint_rate([ReceivedFlow([0.0, 0.0], 5)], 0.1) is None


def test_bytes_grow_with_the_rate_within_bounds() -> None:
    messages = NODE_SIZES.messages
    assert NODE_SIZES.message_bytes(2.5 * MB, 0.1) == pytest.approx(2.5 * MB * 0.4 / messages, rel=0.01)
    assert NODE_SIZES.message_bytes(1e12, 0.1) * messages <= NODE_SIZES.most_bytes
    assert NODE_SIZES.message_bytes(1.0, 0.1) == LEAST_MESSAGE_BYTES


# The peers that are asked


def test_the_two_peers_that_ask_for_most_come_first() -> None:
    candidates = hub_candidates(
        by_ends(links({"slow": 1.0, "a": 10.0, "b": 10.0, "mid": 5.0})), ["slow", "a", "b", "mid"]
    )
    assert candidates["a"][:2] == ["b", "mid"]
    assert sorted(candidates["mid"]) == ["a", "b"]
    assert sorted(candidates["slow"]) == ["a", "b", "mid"]  # all of them fill its line


def test_a_peer_must_be_fast_both_ways() -> None:
    rates = by_ends(links(dict.fromkeys("abcd", 10.0)))
    rates["b", "a"] = rates["b", "a"].model_copy(update={"bandwidth_bytes_per_s": 1.0})
    assert sorted(hub_candidates(rates, list("abcd"))["a"]) == ["c", "d"]


def test_two_nodes_or_peers_out_of_reach_have_no_line_to_measure() -> None:
    assert hub_candidates(by_ends(links({"a": 1.0, "b": 1.0})), ["a", "b"]) == {}
    some = {
        ends: link for ends, link in by_ends(links(dict.fromkeys("abc", 1.0))).items() if ends != ("a", "b")
    }
    assert list(hub_candidates(some, list("abc"))) == ["c"]


@pytest.mark.parametrize("count", [3, 4, 6, 7, 24, 64])
def test_every_hub_once_in_few_rounds_of_disjoint_triples(count: int) -> None:
    names = [str(i) for i in range(count)]
    wanted = hub_candidates(by_ends(links(dict.fromkeys(names, 1.0))), names)
    rounds, late = hub_rounds(wanted)
    assert not late
    assert sorted(t.hub for triples in rounds for t in triples) == sorted(names)
    for triples in rounds:
        nodes = [name for t in triples for name in (t.hub, *t.peers)]
        assert len(set(nodes)) == len(nodes)
    assert len(rounds) <= 5


def test_hubs_that_all_need_the_same_peers_are_left_out_in_the_end() -> None:
    rounds, late = hub_rounds({f"h{i}": ["x", "y"] for i in range(9)}, most=4)
    assert [len(triples) for triples in rounds] == [1] * 4
    assert late == [f"h{i}" for i in range(4, 9)]


# The launcher's side, against processes that follow a script


class Script:
    """A node's process, and the network it believes in: ``rate`` bytes a second for each flow.

    Faults: flows are ``unlucky`` in short windows; they take all of a ``busy`` node's processors.
    """

    def __init__(self, name: str, rates: dict[tuple[str, str], float], fault: str = "") -> None:
        self.name, self.rates, self.fault = name, rates, fault
        self.orders: list[dict[str, Any]] = []
        self.events: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def send(self, message: dict[str, Any], body: bytes = b"") -> None:
        assert message["op"] == "line"
        self.orders.append(message)
        answer = {"event": "line", "hub": message["hub"]}
        if self.fault == "silent":
            return
        if self.fault == "dies":
            self.events.put(None)
            return
        if self.fault == "refuses":
            self.events.put(answer | {"error": f"{self.name} can't"})
            return
        if message["role"] == "hub":
            event = {
                "event": "line-listening",
                "hub": message["hub"],
                "address": "192.0.2.1",
                "ports": [5, 6],
            }
            self.events.put(event)
        arrivals = {}
        for pair in message["pairs"]:
            each_s = pair["receive_bytes"] / self.rates[pair["peer"], self.name]
            if self.fault == "unlucky" and pair["messages"] == NODE_SIZES.messages:
                each_s /= 0.7
            count = 0 if self.fault == "nothing" else pair["messages"]
            arrivals[pair["peer"]] = [each_s * (i + 1) for i in range(count)]
        if self.fault == "busy":
            answer["busy_share"] = 0.95
        self.events.put(answer | {"arrivals": arrivals})

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
    fleets: list[DeviceProbes],
    alone: dict[str, float],
    both: dict[tuple[str, str], float],
    **faults: str,
) -> tuple[list[LineProfile], dict[str, str], DeviceProbes, dict[str, Script]]:
    """``both``: what a flow gets beside the others, where that is less than alone."""
    measured = links(alone)
    rates = {(k.source, k.target): k.bandwidth_bytes_per_s or 0.0 for k in measured} | both
    probes = DeviceProbes()
    fleets.append(probes)
    scripts = {name: Script(name, rates, faults.get(name, "")) for name in alone}
    for name, script in scripts.items():
        member = DeviceProbe(Node(name=name, transport="local"), "192.0.2.1", script, facts=FACTS)
        probes.add(member)
    limit_s = 0.2 if "silent" in faults.values() else 20.0
    rounds: list[tuple[int, int]] = []
    addresses = {name: f"192.0.2.{i}" for i, name in enumerate(alone)}
    lines, reasons = measure_node_lines(
        probes,
        addresses,
        measured,
        lambda done, of: rounds.append((done, of)),
        connect_s=limit_s,
        transfer_s=limit_s,
    )
    assert [done for done, _ in rounds] == list(range(len(rounds)))
    assert all(done < of for done, of in rounds)
    return lines, reasons, probes, scripts


def test_a_shared_line_is_found_in_the_direction_that_shares(fleets: list[DeviceProbes]) -> None:
    halves = {("a", "m"): 1.3 * MB, ("b", "m"): 1.3 * MB}
    lines, reasons, probes, scripts = play(fleets, {"a": 12.5 * MB, "b": 12.5 * MB, "m": 2.5 * MB}, halves)
    assert not reasons
    assert not probes.failures
    (line,) = [shared for shared in lines if shared.node == "m"]
    assert line.direction == "in"
    assert sorted(line.peers) == ["a", "b"]
    assert line.bandwidth_bytes_per_s == pytest.approx(2.6 * MB, rel=0.01)
    assert [order["role"] for order in scripts["m"].orders].count("hub") == 1
    (asked,) = [order for order in scripts["m"].orders if order["role"] == "hub"]
    secrets = {pair["peer"]: pair["secret"] for pair in asked["pairs"]}
    for peer in "ab":
        (order,) = [o for o in scripts[peer].orders if o["hub"] == "m"]
        assert order["pairs"][0]["secret"] == secrets[peer]
        assert order["port"] == (5 if line.peers[0] == peer else 6)


def test_what_is_not_shared_is_not_recorded(fleets: list[DeviceProbes]) -> None:
    lines, reasons, probes, _ = play(fleets, dict.fromkeys("abcdef", 5 * MB), {})
    assert (lines, reasons, probes.failures) == ([], {}, {})


def test_one_short_window_is_no_evidence(fleets: list[DeviceProbes]) -> None:
    lines, reasons, _, scripts = play(fleets, dict.fromkeys("abc", 5 * MB), {}, a="unlucky")
    assert (lines, reasons) == ([], {})
    asked = [order for order in scripts["a"].orders if order["role"] == "hub"]
    assert len(asked) == 2, "it was measured again, for longer"
    assert asked[1]["pairs"][0]["messages"] > asked[0]["pairs"][0]["messages"]


def test_what_stays_slow_is_shared(fleets: list[DeviceProbes]) -> None:
    seventy = {("b", "a"): 3.5 * MB, ("c", "a"): 3.5 * MB}
    lines, _, _, scripts = play(fleets, dict.fromkeys("abc", 5 * MB), seventy)
    (line,) = lines
    assert (line.node, line.direction) == ("a", "in")
    assert line.bandwidth_bytes_per_s == pytest.approx(7 * MB, rel=0.01)
    assert [order["role"] for order in scripts["a"].orders].count("hub") == 2


def test_processors_that_flows_take_whole_show_no_line(fleets: list[DeviceProbes]) -> None:
    halves = {("a", "c"): 2.5 * MB, ("b", "c"): 2.5 * MB}
    lines, reasons, _, _ = play(fleets, dict.fromkeys("abc", 5 * MB), halves, c="busy")
    assert not lines
    assert reasons["c"] == "the flows took 95% of the processors of c"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("refuses", "b: b can't"),
        ("nothing", "never under way together"),
        ("silent", "b: no answer in time"),
    ],
)
def test_a_failed_line_is_left_out_with_the_reason_and_fails_no_node(
    fleets: list[DeviceProbes], fault: str, words: str
) -> None:
    lines, reasons, probes, _ = play(fleets, dict.fromkeys("abc", 5 * MB), {}, b=fault)
    assert not lines
    assert not probes.failures
    assert set(reasons) == {"a", "b", "c"}
    assert any(words in reason for reason in reasons.values())


def test_a_process_that_ends_is_its_nodes_failure_as_ever(fleets: list[DeviceProbes]) -> None:
    halves = {("a", "c"): 2.5 * MB, ("d", "c"): 2.5 * MB}
    names = dict.fromkeys("abcd", 5 * MB)
    lines, reasons, probes, _ = play(fleets, names, halves, b="dies")
    assert list(probes.failures) == ["b"]
    assert "ended while it was probed" in probes.failures["b"].error
    assert all(line.node == "c" for line in lines)
    assert "b" in reasons


def test_latency_lengthens_what_is_left_out() -> None:
    rates = by_ends(links(dict.fromkeys("abc", 1 * MB), latency_s=0.02))
    ((triple,),) = [
        triples for triples in hub_rounds(hub_candidates(rates, list("abc")))[0] if triples[0].hub == "a"
    ]
    assert triple_settle_s(rates, triple) == pytest.approx(0.2)


# The node's side, over real sockets


def test_four_flows_over_real_pairs() -> None:
    torch.set_num_threads(1)
    hub = [PeerConnection(name, 10.0, secret=name) for name in ("x", "y")]
    ports = [pair.listen("127.0.0.1") for pair in hub]
    sizes = {"x": (3000, 70000), "y": (50000, 800)}  # to the hub, from the hub
    at_peers: dict[str, list[float]] = {}

    def peer(name: str, port: int) -> None:
        pair = PeerConnection("hub", 10.0, secret=name)
        pair.connect("127.0.0.1", port, "127.0.0.1", 10.0)
        at_peers[name] = exchange_flows(pair, FlowSpec(9, *sizes[name]), None)
        pair.close(graceful=True)

    threads = [threading.Thread(target=peer, args=entry) for entry in zip("xy", ports, strict=True)]
    for thread in threads:
        thread.start()
    arrivals = run_hub([(pair, FlowSpec(9, *sizes[pair.peer][::-1])) for pair in hub], 10.0)
    for thread in threads:
        thread.join(20.0)
    for times in (*arrivals.values(), *at_peers.values()):
        assert len(times) == 9
        assert times == sorted(times)
        assert times[0] > 0


def test_a_peer_that_stays_away_ends_the_other_flows_too() -> None:
    hub = [PeerConnection(name, 10.0, secret=name) for name in ("x", "y")]
    ports = [pair.listen("127.0.0.1") for pair in hub]
    ended: list[SkyctlError] = []

    def peer() -> None:
        pair = PeerConnection("hub", 10.0, secret="x")
        try:
            pair.connect("127.0.0.1", ports[0], "127.0.0.1", 10.0)
            exchange_flows(pair, FlowSpec(3, 100, 100), None)
        except SkyctlError as exc:
            ended.append(exc)
        finally:
            pair.close()

    thread = threading.Thread(target=peer)
    thread.start()
    with pytest.raises(RunError, match="no connection with y"):
        run_hub([(pair, FlowSpec(3, 100, 100)) for pair in hub], 5.0)
    thread.join(20.0)
    assert isinstance(ended[0], PeerLostError)


@pytest.mark.slow
def test_local_processes_for_real() -> None:
    """On a busy machine's loopback, too, nothing fails, and no line is below what it carried alone."""
    names = [Node(name=n, transport="local", python=sys.executable, threads=1) for n in ("n1", "n2", "n3")]
    sessions = open_sessions(names, ConnectOptions())
    probes = DeviceProbes()
    try:
        for node in names:
            session = sessions[node.name]
            assert isinstance(session, Session)
            probes.start(session, ProbeOrder(None, None, threads=1, slowdown=1.0), name="probe")
        probes.wait(probes.alive(), "facts", 240.0, lambda member, event: member.facts.update(event))
        measured = links(dict.fromkeys(("n1", "n2", "n3"), 20 * MB), latency_s=0.0001)
        lines, reasons = measure_node_lines(probes, dict.fromkeys(sessions, "127.0.0.1"), measured)
        assert not probes.failures
        assert all("of the processors of" in reason for reason in reasons.values())
        assert all(line.bandwidth_bytes_per_s >= 20 * MB for line in lines)
    finally:
        probes.close()
        for session in sessions.values():
            if isinstance(session, Session):
                session.close()
