"""Figures of earlier profiles are taken over while they hold, for all devices of a machine or for none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.helpers.bare_records import OF_DEVICE, OF_LAYER, OF_NODE, OF_PROFILE, OF_WORKLOAD

from skyctl.probe.device_probes import DeviceProbe
from skyctl.probe.link_measurement import ring_rounds
from skyctl.probe.node.probe_requests import DistinctLayer
from skyctl.probe.profile_cache import (
    CachedTimings,
    age_text,
    cached_links,
    cached_timings,
    costliest_layers,
    fingerprints,
    reused_figures,
)
from skyctl.records.cluster import Node
from skyctl.records.profile import (
    Conditions,
    DeviceProfile,
    LayerCosts,
    LayerTiming,
    LinkProfile,
    MessageCosts,
    NodeProfile,
    Profile,
    ShapeProfile,
    SiteProfile,
    UplinkProfile,
    WorkloadProfile,
)

NOW = "2026-03-01T12:00:00+00:00"
BEFORE = "2026-03-01T10:00:00+00:00"
FACTS = {
    "device": "cpu:0",
    "devices": [{"id": "cpu:0", "name": "a cpu"}],
    "cpu_model": "a cpu",
    "cpus": 0.4,
    "threads": 1,
    "torch": "2.6.0",
    "boot_id": "boot",
}


class Silent:
    """A process that is never asked."""

    def send(self, message: dict[str, Any], body: bytes = b"") -> None: ...

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes] | None: ...

    def kill(self) -> None: ...


def member(name: str, **more: Any) -> DeviceProbe:
    node = Node(name=name, transport="local")
    return DeviceProbe(node, "127.0.0.1", Silent(), {**FACTS, "cpu_scope": f"boot/{name}", **more})


def shape(*signatures: str, size: int = 2) -> ShapeProfile:
    sizes = {
        **OF_LAYER,
        "state_bytes": 1.0,
        "activation_bytes": 1.0,
        "output_bytes": 1.0,
        "workspace_bytes": 0.0,
    }
    layers = [LayerCosts(name=f"l{i}", signature=s, flops=1e6, **sizes) for i, s in enumerate(signatures)]
    return ShapeProfile(microbatch_size=size, microbatches=4, layers=layers)


def timing(signature: str, seconds: float = 0.01, **more: Any) -> LayerTiming:
    figures = {"forward_s": seconds, "backward_s": seconds, "interval": 0.01, **more}
    return LayerTiming(signature=signature, microbatch_size=2, **figures)


def device(name: str, print_: str | None, *timings: LayerTiming, **more: Any) -> DeviceProfile:
    defaults = {
        "name": "a cpu",
        "threads": 1,
        "slowdown": 1.0,
        "memory_bytes": 1e9,
        "memory_from": "free memory",
    }
    figures = {
        **OF_DEVICE,
        "reserved_bytes": 5e8,
        "flops_per_s": 1e9,
        "handling_s": 0.25,
        "action_s": 0.125,
        "step_s": 0.0625,
        "message_byte_s": 1e-9,
        "reduce_byte_s": 2e-10,
        "measured": BEFORE,
    }
    return DeviceProfile(
        id=f"{name}/cpu:0", node=name, fingerprint=print_, timings=timings, **{**defaults, **figures, **more}
    )


def profile(*devices: DeviceProfile, dtype: str = "float32", **more: Any) -> Profile:
    workload = WorkloadProfile(
        source="gpt:…", digest="w", batch_size=8, dtype=dtype, shapes=[shape("x", "y")], **OF_WORKLOAD
    )
    defaults = {**OF_PROFILE, "nodes": (), "links": (), "workload": workload}
    return Profile(cluster="c", cluster_digest="d", created=BEFORE, devices=devices, **{**defaults, **more})


def prints(*members: DeviceProbe) -> dict[str, str]:
    return fingerprints(members)


def test_what_is_known_is_not_asked_for_again() -> None:
    them = [member("a"), member("b")]
    p = prints(*them)
    earlier = profile(*(device(n, p[f"{n}/cpu:0"], timing("x"), timing("y")) for n in "ab"))
    cached = cached_timings(them, [earlier], [shape("x", "y")], "float32", NOW)
    layer = DistinctLayer(0, "l0", {2: "x"}, {2: 1.0})
    assert cached.to_measure("a/cpu:0", [layer]) == (replace(layer, known_sizes=(2,)),)
    assert not cached.handles("a/cpu:0")
    waited = {"signature": "x", "microbatch_size": 2, "skipped": "there was no time for it"}
    them[0].measured = {"timings": [waited], "reserved_bytes": 1e8, "handling_s": 9.0}
    them[1].measured = {"timings": [], "reserved_bytes": 6e8, "handling_s": 9.0}
    cached.complete(them)
    assert [(row["signature"], row["forward_s"]) for row in them[0].measured["timings"]] == [
        ("x", 0.01),
        ("y", 0.01),
    ]
    assert [m.measured["reserved_bytes"] for m in them] == [5e8, 6e8]
    overhead = [them[0].measured[name] for name in ("handling_s", "action_s", "step_s")]
    assert overhead == [0.25, 0.125, 0.0625]
    assert [them[0].measured[name] for name in ("message_byte_s", "reduce_byte_s")] == [1e-9, 2e-10]
    dated = cached.dated(earlier.devices[0].model_copy(update={"measured": None, "fingerprint": None}), NOW)
    assert (dated.measured, dated.fingerprint) == (BEFORE, p["a/cpu:0"])


@pytest.mark.parametrize(
    ("name", "gloo", "has_gloo", "again"),
    [
        ("cpu:0", True, False, True),
        ("cpu:0", True, True, False),
        ("cpu:0", False, False, False),
        ("cuda:0", True, False, False),
    ],
)
def test_a_profile_without_gloo_has_messages_measured_again_where_that_is_wanted(
    name: str, gloo: bool, has_gloo: bool, again: bool
) -> None:
    costs = MessageCosts(handling_s=0.5, handling_byte_s=0.0, step_s=0.25, message_byte_s=2e-9)
    source = device("a", None, reduce_byte_s=1e-9, gloo=costs if has_gloo else None)
    row = {("x", 2): timing("x")}
    cached = CachedTimings(rows={f"a/{name}": row}, sources={f"a/{name}": source}, gloo=gloo)
    assert cached.handles(f"a/{name}") is again
    assert cached.handles_gloo(f"a/{name}") is (gloo and name == "cpu:0")


def test_rows_are_joined_only_where_the_same_was_taken_off() -> None:
    them = [member("a")]
    p = prints(*them)
    newest, older, same = (
        profile(device("a", p["a/cpu:0"], timing(name), action_s=action_s))
        for name, action_s in (("x", 1e-3), ("y", 0.0), ("z", 1e-3))
    )
    cached = cached_timings(them, [newest, older, same], [shape("x", "y", "z")], "float32", NOW)
    assert set(cached.rows["a/cpu:0"]) == {("x", 2), ("z", 2)}
    assert cached.lacking == {"a/cpu:0": {("y", 2)}}
    assert cached.actions == {"a/cpu:0": 1e-3}, "what is measured now has that taken off as well"


def test_what_one_device_of_a_machine_lacks_all_of_them_measure() -> None:
    them = [member("a"), member("b"), member("c", boot_id="another", cpu_scope="another")]
    p = prints(*them)
    earlier = profile(
        device("a", p["a/cpu:0"], timing("x"), timing("y")),
        device("b", p["b/cpu:0"], timing("x")),
        device("c", p["c/cpu:0"], timing("x"), timing("y")),
    )
    cached = cached_timings(them, [earlier], [shape("x", "y")], "float32", NOW)
    assert cached.handles("a/cpu:0")
    assert cached.lacking == {"a/cpu:0": {("y", 2)}, "b/cpu:0": {("y", 2)}, "c/cpu:0": set()}
    them[0].measured = {"timings": [timing("x", 0.5).model_dump(), timing("y", 0.5).model_dump()]}
    cached.complete(them[:1])
    assert [(row["signature"], row["forward_s"]) for row in them[0].measured["timings"]] == [
        ("x", 0.01),
        ("y", 0.5),
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {"threads": 2},
        {"cpus": 0.2},
        {"torch": "2.7.0"},
        {"cpu_model": "another"},
        {"devices": [{"id": "cpu:0", "name": "another"}]},
    ],
)
def test_another_machine_measures_anew(changed: dict[str, Any]) -> None:
    earlier = profile(device("a", prints(member("a"))["a/cpu:0"], timing("x")))
    cached = cached_timings([member("a", **changed)], [earlier], [shape("x")], "float32", NOW)
    assert cached.lacking == {"a/cpu:0": {("x", 2)}}


def test_more_devices_on_the_same_processors_measure_anew() -> None:
    earlier = profile(device("a", prints(member("a"))["a/cpu:0"], timing("x")))
    pair = [member("a"), member("b", cpu_scope="boot/a")]
    assert cached_timings(pair, [earlier], [shape("x")], "float32", NOW).lacking["a/cpu:0"] == {("x", 2)}


@pytest.mark.parametrize(
    "changes",
    [
        {"measured": "2026-01-01T00:00:00+00:00"},
        {"conditions": Conditions(wall_s=1.0, share=0.5)},
        {"timings": (timing("x", interval=0.2),)},
        {"timings": (LayerTiming(signature="x", microbatch_size=2, skipped="too large"),)},
    ],
)
def test_what_was_not_measured_well_or_lately_is_measured_anew(changes: dict[str, Any]) -> None:
    them = [member("a")]
    stale = device("a", prints(*them)["a/cpu:0"], timing("x")).model_copy(update=changes)
    assert cached_timings(them, [profile(stale)], [shape("x")], "float32", NOW).lacking["a/cpu:0"]


def test_another_dtype_is_another_matter() -> None:
    them = [member("a")]
    earlier = profile(device("a", prints(*them)["a/cpu:0"], timing("x")), dtype="bfloat16")
    assert cached_timings(them, [earlier], [shape("x")], "float32", NOW).lacking["a/cpu:0"]


def test_the_newest_profile_of_each_layer_counts_and_the_date_is_the_oldest() -> None:
    them = [member("a")]
    p = prints(*them)["a/cpu:0"]
    new = profile(device("a", p, timing("x", 0.02)))
    old = profile(device("a", p, timing("x", 0.5), timing("y"), measured="2026-02-28T00:00:00+00:00"))
    cached = cached_timings(them, [new, old], [shape("x", "y")], "float32", NOW)
    assert cached.rows["a/cpu:0"]["x", 2].forward_s == 0.02
    assert cached.dates["a/cpu:0"] == "2026-02-28T00:00:00+00:00"
    assert cached.lacking == {"a/cpu:0": set()}


def node(name: str, address: str) -> NodeProfile:
    words = dict.fromkeys(("hostname", "platform", "python", "torch", "cpu_model"), "x")
    memory = {"memory_total_bytes": 1e9, "memory_available_bytes": 1e9}
    return NodeProfile(name=name, cpus=1.0, address=address, interface=None, **words, **memory, **OF_NODE)


def linked(p: dict[str, str], **more: Any) -> Profile:
    names = ("a", "b", "c")
    return profile(
        *(device(n, p[f"{n}/cpu:0"]) for n in names),
        nodes=[node(n, f"10.0.0.{i}") for i, n in enumerate(names)],
        links=[
            LinkProfile(source=s, target=t, latency_s=0.001, bandwidth_bytes_per_s=1e6)
            for s in names
            for t in names
            if s != t
        ],
        sites=[SiteProfile(name="s1", nodes=["a", "b"]), SiteProfile(name="s2", nodes=["c"])],
        uplinks=[
            UplinkProfile(site=site, direction="in", bandwidth_bytes_per_s=1e6, pairs=[["a", "c"]])
            for site in ("s1", "s2")
        ],
        **more,
    )


def test_links_are_taken_over_while_both_ends_are_what_and_where_they_were() -> None:
    them = [member(name) for name in "abc"]
    earlier = linked(prints(*them))
    cached = cached_timings(them[:2], [], [], "", NOW)
    addresses = {"a": "10.0.0.0", "b": "10.0.0.1"}
    taken = cached_links([earlier], cached, addresses, NOW)
    assert taken is not None
    assert [(k.source, k.target, k.measured) for k in taken.links] == [("a", "b", BEFORE), ("b", "a", BEFORE)]
    assert [(site.name, site.nodes) for site in taken.sites] == [("s1", ("a", "b"))]
    assert [uplink.site for uplink in taken.uplinks] == ["s1"]
    assert cached_links([earlier], cached, {**addresses, "b": "10.0.0.9"}, NOW) is None
    assert cached_links([earlier], cached, addresses, "2026-03-02T12:00:00+00:00") is None
    other = cached_timings([them[0], member("b", torch="2.7.0")], [], [], "", NOW)
    assert cached_links([earlier], other, addresses, NOW) is None
    lost = earlier.links[0].model_copy(update={"error": "no route"})
    assert (
        cached_links(
            [earlier.model_copy(update={"links": (lost, *earlier.links[1:])})], cached, addresses, NOW
        )
        is None
    )


def test_it_is_said_what_was_taken_over() -> None:
    earlier = profile(device("a", "p", timing("x")), device("b", "p", timing("x"), measured=NOW))
    assert reused_figures(earlier.model_copy(update={"created": NOW})) == [
        "layer times of a/cpu:0 are of 2 h ago"
    ]
    assert reused_figures(earlier.model_copy(update={"devices": ()})) == []


def test_ages_in_words() -> None:
    assert age_text("2026-03-01T11:59:20+00:00", NOW) == "40 s"
    assert age_text("2026-02-26T12:00:00+00:00", NOW) == "3 days"
    assert age_text("tomorrow", NOW) == "unknown age"


def test_a_recheck_measures_each_devices_costliest_layer() -> None:
    them = [member("a"), member("new")]
    then = profile(device("a", "p", timing("x", 0.01), timing("y", 0.02)))
    assert costliest_layers(then, 2, them).lacking == {"a/cpu:0": [("y", 2)], "new/cpu:0": []}


@pytest.mark.parametrize("count", range(1, 12))
def test_a_ring_takes_two_or_three_rounds_of_disjoint_pairs(count: int) -> None:
    rounds = ring_rounds(list(range(count)))
    assert len(rounds) == {1: 0, 2: 1}.get(count, 2 + count % 2)
    for pairs in rounds:
        assert len({end for pair in pairs for end in pair}) == 2 * len(pairs)
    assert len([pair for pairs in rounds for pair in pairs]) == {1: 0, 2: 1}.get(count, count)
