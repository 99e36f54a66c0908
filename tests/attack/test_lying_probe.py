"""A node that lies about what it measures: figures that no device has are refused with its name."""

from __future__ import annotations

import random
from typing import Any

import pytest

from skyctl.errors import ProtocolError
from skyctl.records.cluster import Cluster
from skyctl.records.profile import Profile

from . import lies
from .lying_ranks import (
    NODES,
    SEED,
)


def probe_scripts() -> tuple[Any, Any, Any]:
    from ..probe.test_cluster_probe import GOOD, FakeSession, cluster

    return GOOD, FakeSession, cluster


@pytest.mark.parametrize("seed", range(2))
def test_what_a_probe_sends(seed: int) -> None:
    from skyctl.probe.cluster_probe import ProbeOptions, measure_cluster

    good, session, cluster = probe_scripts()
    rng = random.Random(SEED + seed)
    them: Cluster = cluster(lies.HONEST, lies.LIAR, "also")
    options = ProbeOptions(start_s=0.2, cap_s=0.2)
    refused = 0
    for _ in range(30):
        order = rng.choice(["start", "measure", "count", "stop", "link listen", "link connect"])
        at = rng.randrange(len(good[order]))
        (lie,) = lies.lies(rng, [good[order][at]], 1)
        script = {**good, order: [*good[order][:at], lie, *good[order][at + 1 :]]}
        sessions = {
            node.name: session(node, script if node.name == lies.LIAR else good) for node in them.nodes
        }
        profile = measure_cluster(them, sessions, options=options)
        Profile.model_validate_json(profile.to_json())
        assert {failure.node for failure in profile.failures} <= {lies.LIAR}, (lie, profile.failures)
        assert {device.node for device in profile.devices} >= {lies.HONEST, "also"}
        for failure in profile.failures:
            assert lies.LIAR in failure.error, failure
            refused += 1
    assert refused > 10, refused


@pytest.mark.parametrize(
    ("order", "lie", "words"),
    [
        ("stop", {"flops_per_s": 1e30}, "flops_per_s: 1e\\+30 is not from"),
        ("stop", {"flops_per_s": float("nan")}, "nan is no number"),
        ("stop", {"flops_per_s": -1.0}, "-1.0 is not from"),
        ("stop", {"memory_bytes": 1e40}, "memory_bytes"),
        ("stop", {"timings": [{"signature": "x", "microbatch_size": 1}]}, "has timed 1 layers, not the 0"),
        ("start", {"devices": [{"id": "cpu:0", "name": "a"}] * 2}, "lists a device twice"),
        ("start", {"device": "cuda:7"}, "measures cuda:7"),
        ("start", {"cpus": float("inf")}, "inf is no number"),
    ],
)
def test_a_figure_that_no_device_has_is_refused_by_name(order: str, lie: lies.Message, words: str) -> None:
    import re

    from skyctl.probe.cluster_probe import ProbeOptions, measure_cluster

    good, session, cluster = probe_scripts()
    them: Cluster = cluster(lies.HONEST, lies.LIAR)
    bad = {**good, order: [{**good[order][0], **lie}]}
    sessions = {lies.HONEST: session(them.nodes[0], good), lies.LIAR: session(them.nodes[1], bad)}
    profile = measure_cluster(them, sessions, options=ProbeOptions(start_s=5.0, cap_s=5.0))
    (failure,) = profile.failures
    assert failure.node == lies.LIAR
    assert re.search(words, failure.error), failure.error
    assert [device.node for device in profile.devices] == [lies.HONEST]


def test_layers_that_are_faster_than_physics() -> None:
    from skyctl.probe.probe_messages import check_timings

    row = {"signature": "a", "microbatch_size": 2, "forward_s": 1e-12, "backward_s": 0.0}
    check_timings(NODES[lies.LIAR], [row], {("a", 2): 1e5})
    with pytest.raises(ProtocolError, match="node liar claims 1e\\+09 FLOPs in 1e-12 s"):
        check_timings(NODES[lies.LIAR], [row], {("a", 2): 1e9})


def test_arrivals_that_can_not_be() -> None:
    from skyctl.probe.probe_messages import check_arrivals

    node = NODES[lies.LIAR]
    check_arrivals(node, {"a": [0.1, 0.2]}, {"a": 1000}, 4)
    for arrivals in ({}, {"b": [0.1]}, {"a": [0.2, 0.1]}, {"a": [0.1] * 5}, {"a": [1e-300]}):
        with pytest.raises(ProtocolError, match="node liar tells of"):
            check_arrivals(node, arrivals, {"a": 1000}, 4)
