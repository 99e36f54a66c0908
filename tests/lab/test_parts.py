"""The lab's pure parts: addresses, buckets, quotas, and the switch played on numbers."""

from __future__ import annotations

import struct

import pytest

from skyctl.lab import cgroup_quotas, traffic_shaping
from skyctl.lab.delay_switch import HEADER, QUEUE_S, DelaySwitch, wire_bytes
from skyctl.lab.lab_spec import LabSpec
from skyctl.lab.lab_state import token_of

A, B, C = (bytes((2, 0, 0, 0, site, 1)) for site in range(3))
SITES = {A: 0, B: 1, C: 2}


def frame(target: bytes, source: bytes, size: int = 1000) -> bytes:
    return bytes(HEADER) + (target + source).ljust(size, b"\0")


class Wire:
    """A switch whose clock is moved by hand."""

    def __init__(self, rates, latency_s):
        self.arrived = []
        self.now = 0.0
        self.switch = DelaySwitch(
            SITES, rates, [latency_s] * 3, lambda site, _: self.arrived.append((site, self.now))
        )

    def finish(self):
        """Plays on to the end and gives (site, when) of every frame."""
        while True:
            due = self.switch.deliver(self.now)
            if due is None:
                return self.arrived
            assert due > self.now
            self.now = due


def test_a_frame_takes_the_latency():
    wire = Wire([None, None, None], 0.005)
    wire.switch.take(0, frame(B, A), 0.0)
    assert wire.finish() == [(1, 0.005)]


def test_an_uplink_serialises_what_leaves():
    wire = Wire([1e6, None, None], 0.005)
    for _ in range(3):
        wire.switch.take(0, frame(B, A), 0.0)
    assert [when for _, when in wire.finish()] == pytest.approx([0.006, 0.007, 0.008])


def test_an_uplink_serialises_what_comes_in_from_two_sites():
    wire = Wire([None, None, 1e6], 0.0)
    wire.switch.take(0, frame(C, A), 0.0)
    wire.switch.take(1, frame(C, B), 0.0)
    assert [when for _, when in wire.finish()] == pytest.approx([0.001, 0.002])


def test_both_directions_are_apart():
    wire = Wire([None, 1e6, None], 0.0)
    wire.switch.take(0, frame(B, A), 0.0)
    wire.switch.take(1, frame(A, B), 0.0)
    assert sorted(wire.finish()) == [(0, pytest.approx(0.001)), (1, pytest.approx(0.001))]


def test_a_full_queue_drops():
    rate = 4e6  # bytes a second: a tenth of a second holds 400 frames
    wire = Wire([rate, None, None], 0.0)
    for _ in range(1000):
        wire.switch.take(0, frame(B, A), 0.0)
    held = QUEUE_S * rate / 1000
    assert held <= len(wire.finish()) <= held + 2
    assert wire.switch.dropped == 1000 - len(wire.arrived)


def test_a_broadcast_reaches_every_other_site():
    wire = Wire([None, None, None], 0.001)
    wire.switch.take(1, frame(b"\xff" * 6, B), 0.0)
    assert sorted(site for site, _ in wire.finish()) == [0, 2]


def test_only_what_goes_between_sites_passes():
    wire = Wire([None, None, None], 0.0)
    stranger = bytes((2, 0, 0, 0, 0, 254))
    wire.switch.take(0, frame(A, A), 0.0)  # flooded by its bridge
    wire.switch.take(0, frame(B, stranger), 0.0)  # the launcher's
    wire.switch.take(0, frame(stranger, A), 0.0)
    wire.switch.take(1, frame(B, A), 0.0)  # come back over another site
    assert wire.finish() == []


def test_a_large_segment_counts_its_pieces_headers():
    whole = struct.pack("=BBHHHH", 1, 1, 54, 1448, 0, 0) + bytes(54 + 3 * 1448)
    assert wire_bytes(whole) == 3 * (1448 + 54)
    assert wire_bytes(frame(A, B, 60)) == 60


def test_quotas_have_short_periods():
    assert cgroup_quotas.quota_us(0.4) == (4000, 10_000)
    assert cgroup_quotas.quota_us(2.0) == (20_000, 10_000)
    assert cgroup_quotas.quota_us(0.05) == (1000, 20_000)
    assert cgroup_quotas.quota_us(0.4, period_ms=100) == (40_000, 100_000)
    for cpus in (0.001, 0.0123, 0.333, 7.7):
        quota, period = cgroup_quotas.quota_us(cpus)
        assert quota >= 1000
        assert period <= 1_000_000
        assert quota / period == pytest.approx(cpus, rel=0.02)


def test_quotas_may_all_have_the_same_slice():
    assert cgroup_quotas.quota_us(0.05, 5) == (5000, 100_000)
    assert cgroup_quotas.quota_us(0.8, 5) == (5000, 6250)
    assert cgroup_quotas.quota_us(2.0, 5) == (5000, 2500)
    assert cgroup_quotas.quota_us(8.0, 1) == (8000, 1000)
    assert cgroup_quotas.quota_us(0.001, 5) == (1000, 1_000_000)


def test_places_addresses_and_interface_names():
    nodes = [{"name": f"n{i}", "cpus": 1.0, "site": "ab"[i % 2]} for i in range(4)]
    together = LabSpec.model_validate({"nodes": nodes})
    apart = LabSpec.model_validate({"nodes": nodes, "sites": {"latency_ms": 1.0}})
    assert traffic_shaping.node_places(together) == [(0, 1), (0, 2), (0, 3), (0, 4)]
    assert traffic_shaping.node_places(apart) == [(0, 1), (1, 1), (0, 2), (1, 2)]
    assert traffic_shaping.node_address(7, 1, 2) == "10.7.1.2"
    assert len(traffic_shaping.launcher_interface(token_of("x" * 63), 249)) <= 15


@pytest.mark.parametrize(("latency_ms", "held_s"), [(0, 0.05), (50, 0.15), (10_000, 1.05)])
def test_a_links_queue_holds_a_round_trip(latency_ms: float, held_s: float):
    nodes = [{"name": f"n{i}", "cpus": 1.0, "rate_mbit": 200, "site": "ab"[i]} for i in range(2)]
    spec = LabSpec.model_validate({"nodes": nodes, "sites": {"latency_ms": latency_ms}})
    for line in (
        *traffic_shaping.network_shaping_commands(spec, "user"),
        *traffic_shaping.node_shaping_commands(spec, 0, "user"),
    ):
        words = line.split()
        queued = int(words[words.index("limit") + 1]) - traffic_shaping.burst_bytes(200)
        assert queued == pytest.approx(200 * 125_000 * held_s, rel=0.001)


def test_netem_is_asked_for_delay_on_the_way_out_and_rate_both_ways():
    nodes = [{"name": "n0", "cpus": 1.0, "site": "a"}, {"name": "n1", "cpus": 1.0, "site": "b"}]
    sites = {"latency_ms": 5.0, "uplink_mbit": {"b": 20.0}}
    lines = traffic_shaping.network_shaping_commands(
        LabSpec.model_validate({"nodes": nodes, "sites": sites}), "netem"
    )
    assert [line.split(" rate")[0].split(" limit")[0] for line in lines] == [
        "qdisc add dev edge0 root netem delay 5000us",
        "qdisc add dev edge1 root netem delay 5000us",
        "qdisc add dev core1 root netem delay 0us",
    ]


def test_a_line_may_take_longer_one_way() -> None:
    arrived = []
    line = DelaySwitch({A: 0, B: 1}, [None, None], [0.002, 0.0], lambda site, _: arrived.append(site))
    line.take(0, frame(B, A), 0.0)
    line.take(1, frame(A, B), 0.0)
    assert line.deliver(0.0) == 0.002
    assert arrived == [0]
    assert line.deliver(0.002) is None
    assert arrived == [0, 1]


def linked_spec(**back: float) -> LabSpec:
    nodes = [{"name": f"n{i}", "cpus": 1.0, "rate_mbit": 100} for i in range(3)]
    links = [
        {"source": "n0", "target": "n2", "rate_mbit": 40.0, "latency_ms": 2.0},
        {"source": "n2", "target": "n0", **back},
    ]
    return LabSpec.model_validate({"nodes": nodes, "links": links})


@pytest.mark.parametrize("switch", ["none", "user", "netem"])
def test_a_pairs_own_line_has_its_ends_in_its_nodes(switch: str):
    spec = linked_spec(rate_mbit=10.0)
    lines = traffic_shaping.line_commands(spec, switch=switch, pids=[11, 12, 13])
    assert ("link add line0a type veth peer name line0b" in lines) == (switch != "user"), "TAPs are there"
    assert [line for line in lines if "netns" in line] == [
        "link set line0a netns 11",
        "link set line0b netns 13",
    ]
    routes = [line for n in range(3) for line in traffic_shaping.node_commands(spec, 7, n) if "route" in line]
    assert routes == [
        "route add 10.7.0.3/32 dev line0a src 10.7.0.1",
        "route add 10.7.0.1/32 dev line0b src 10.7.0.3",
    ]
    shaped = [traffic_shaping.node_shaping_commands(spec, n, switch) for n in range(3)]
    assert [len(commands) for commands in shaped] == [2, 1, 2]
    assert shaped[0][1].startswith(
        "qdisc add dev line0a root " + ("netem delay 2000us rate" if switch == "netem" else "tbf rate 418")
    )
    assert shaped[2][1].startswith("qdisc add dev line0b root tbf rate 104")


def test_a_line_without_a_rate_is_not_shaped():
    spec = linked_spec()
    assert [len(traffic_shaping.node_shaping_commands(spec, n, "user")) for n in (0, 2)] == [2, 1]
    assert len(traffic_shaping.delayed_lines(spec)) == 1


@pytest.mark.parametrize(
    ("network", "count"),
    [
        ("10.3.0.0/24", 1),
        ("10.0.0.0/8", 256),
        ("10.8.0.0/13", 8),
        ("192.168.0.0/16", 0),
        ("default", 0),
        ("10.9.9.9", 1),
    ],
)
def test_networks_in_use_are_left_alone(network, count):
    assert len(traffic_shaping._covered(network)) == count


@pytest.mark.parametrize(
    ("limit", "burst", "held"),
    [("cpu.cfs_quota_us", "cpu.cfs_burst_us", "4000"), ("cpu.max", "cpu.max.burst", "4000 10000")],
)
def test_what_is_left_of_a_quota_may_be_used_later(tmp_path, limit, burst, held):
    (tmp_path / limit).touch()
    cgroup_quotas.set_quota([tmp_path], 0.4)
    assert (tmp_path / limit).read_text() == held
    assert not (tmp_path / burst).exists()
    (tmp_path / burst).touch()
    cgroup_quotas.set_quota([tmp_path], 0.4)
    assert (tmp_path / burst).read_text() == "4000"
