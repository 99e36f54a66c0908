"""A profile beside a quick look: what differs is named, what two measurements may differ by is not."""

from __future__ import annotations

from typing import Any

import pytest
from tests.helpers.bare_records import OF_DEVICE, OF_NODE, OF_PROFILE

from skyctl.jobs.profile_recheck import LATENCY_TOLERANCE_S, profile_changes
from skyctl.learning.evidence import TIME_TOLERANCE
from skyctl.records.profile import DeviceProfile, LayerTiming, LinkProfile, NodeFailure, NodeProfile, Profile


def node(name: str, **more: Any) -> NodeProfile:
    words = dict.fromkeys(("hostname", "platform", "cpu_model"), "x")
    known = {**OF_NODE, "python": "3.11.2", "torch": "2.6.0", "cpus": 1.0, **words}
    memory = {"memory_total_bytes": 4e9, "memory_available_bytes": 4e9}
    return NodeProfile(name=name, address=None, interface=None, **memory, **{**known, **more})


def device(name: str, seconds: float = 0.01, **more: Any) -> DeviceProfile:
    timing = LayerTiming(signature="x", microbatch_size=2, forward_s=seconds, backward_s=seconds)
    known = {**OF_DEVICE, "name": "cpu", "threads": 1, "slowdown": 1.0, "memory_bytes": 4e9}
    figures = {"memory_from": "free memory", "reserved_bytes": 0.0, "flops_per_s": 1e9}
    return DeviceProfile(id=f"{name}/cpu:0", node=name, timings=(timing,), **figures, **{**known, **more})


def too_large(name: str) -> DeviceProfile:
    timing = LayerTiming(signature="x", microbatch_size=2, skipped="needs 5.00 GiB")
    return device(name).model_copy(update={"timings": (timing,)})


def link(latency_s: float = 0.01, rate: float = 1e6, **more: Any) -> LinkProfile:
    return LinkProfile(source="a", target="b", latency_s=latency_s, bandwidth_bytes_per_s=rate, **more)


def profile(nodes: Any, devices: Any, links: Any = (), **more: Any) -> Profile:
    return Profile(
        cluster="c", cluster_digest="d", created="2026-01-01T00:00:00Z", nodes=nodes, devices=devices,
        links=links, **OF_PROFILE | more,
    )  # fmt: skip


THEN = profile([node("a"), node("b")], [device("a"), device("b")], [link()])


def test_noise_is_no_difference() -> None:
    now = profile(
        [node("a", cpus=1.05), node("b")],
        [device("a", 0.01 * (1 + 0.9 * TIME_TOLERANCE), memory_bytes=3.8e9), device("b", memory_bytes=9e9)],
        [link(0.01 + LATENCY_TOLERANCE_S, 0.8e6)],
    )
    assert profile_changes(THEN, now) == []
    only_a = profile([node("a")], [device("a")])  # --limit
    assert profile_changes(THEN, only_a) == []


@pytest.mark.parametrize(
    ("now", "where", "what"),
    [
        (profile([node("a")], [device("a", 0.02)]), "a/cpu:0", "a layer, microbatch of 2"),
        (profile([node("a")], [device("a", 0.005)]), "a/cpu:0", "a layer, microbatch of 2"),
        (profile([node("a")], [device("a", memory_bytes=3e9)]), "a/cpu:0", "usable memory"),
        (profile([node("a", torch="2.7.0")], [device("a")]), "a/cpu:0", "torch"),
        (profile([node("a", cpus=0.5)], [device("a")]), "a/cpu:0", "cpus"),
        (profile([node("a")], []), "a/cpu:0", "device"),
        (profile([node("z")], [device("z")]), "z/cpu:0", "device"),
        (profile([node("a")], [too_large("a")]), "a/cpu:0", "a layer, microbatch of 2"),
        (profile([node("a")], [device("a")], [link(rate=0.5e6)]), "a → b", "rate"),
        (profile([node("a")], [device("a")], [link(0.02)]), "a → b", "latency"),
        (
            profile([], [], [LinkProfile(source="a", target="b", error="no route")]),
            "a → b",
            "link",
        ),
        (profile([], [], failures=[NodeFailure(node="b", error="no route")]), "b", "node"),
    ],
)
def test_each_difference_is_named(now: Profile, where: str, what: str) -> None:
    assert [(one.where, one.what) for one in profile_changes(THEN, now)] == [(where, what)]


def test_a_node_that_failed_then_too_is_no_difference() -> None:
    now = profile([node("a")], [device("a")], failures=[NodeFailure(node="z", error="no route")])
    assert profile_changes(THEN, now) == []


def test_what_was_not_measured_is_not_compared() -> None:
    filled_in = profile([node("a")], [device("a")], [link(estimated=True)])
    assert profile_changes(filled_in, profile([node("a")], [device("a")], [link(rate=1.0)])) == []
    fast = profile([node("a")], [device("a")], [link(rate=4e9)])
    assert profile_changes(fast, profile([node("a")], [device("a")], [link(rate=2e9)])) == []
