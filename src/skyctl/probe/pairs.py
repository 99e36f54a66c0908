"""One round of links: disjoint pairs of processes at the same time, each in both directions."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from skyctl.probe.fleet import Fleet, Member
from skyctl.records.profile import LinkProfile

CONNECT_S = 10.0
MEASURE_S = 60.0


def measure_round(
    fleet: Fleet,
    pairs: Sequence[tuple[Member, Member]],
    addresses: Mapping[str, str],
    *,
    connect_s: float,
    measure_s: float,
) -> dict[tuple[str, str], LinkProfile]:
    """One round, its pairs at the same time. A pair that fails has the reason in both directions."""
    secret = secrets.token_hex(16)
    answers: dict[int, dict[str, Any]] = {}
    peers: dict[int, Member] = {}
    asked: list[Member] = []

    def order(member: Member, peer: Member, **more: Any) -> None:
        member.phase = f"its link with {peer.node.name}"
        message = {"op": "link", "peer": peer.node.name, "secret": secret, "timeout_s": connect_s}
        fleet.send(member, message | {"address": addresses[member.node.name]} | more)

    def handle(member: Member, event: dict[str, Any]) -> None:
        peer = peers.get(id(member))
        if peer is None:
            return
        if event.get("event") == "listening":
            order(peer, member, role="connect", host=event["address"], port=event["port"])
            expected.append(peer)
        elif event.get("event") == "link":
            answers[id(member)] = event

    expected: list[Member] = []
    for a, b in pairs:
        if a.node.name in fleet.failures or b.node.name in fleet.failures:
            continue
        peers[id(a)], peers[id(b)] = b, a
        order(a, b, role="listen")
        asked.append(a)
    fleet.wait(asked, "link", connect_s + measure_s, handle)
    fleet.wait([m for m in expected if id(m) not in answers], "link", connect_s + measure_s, handle)
    found: dict[tuple[str, str], LinkProfile] = {}
    for a, b in pairs:
        if a.node.name in fleet.failures or b.node.name in fleet.failures:
            continue
        ends = [answers.get(id(a), {}), answers.get(id(b), {})]
        errors = [str(end["error"]) for end in ends if end.get("error")]
        for source, target, (end, other) in ((a, b, ends), (b, a, ends[::-1])):
            found[source.node.name, target.node.name] = _link(source, target, end, other, errors)
    return found


def faster(one: LinkProfile, other: LinkProfile) -> LinkProfile:
    """The better of two measurements of one direction, in rate and in latency."""
    if one.bandwidth_bytes_per_s is None or other.bandwidth_bytes_per_s is None:
        return other if one.bandwidth_bytes_per_s is None else one
    latencies = [link.latency_s for link in (one, other) if link.latency_s is not None]
    return one.model_copy(
        update={
            "bandwidth_bytes_per_s": max(one.bandwidth_bytes_per_s, other.bandwidth_bytes_per_s),
            "latency_s": min(latencies, default=None),
        }
    )


def _link(
    source: Member, target: Member, end: dict[str, Any], other: dict[str, Any], errors: Sequence[str]
) -> LinkProfile:
    names = source.node.name, target.node.name
    if "latency_s" not in end:
        reason = "; ".join(dict.fromkeys(errors)) or "the pair gave no figures"
        return LinkProfile(source=names[0], target=names[1], error=reason)
    return LinkProfile(
        source=names[0],
        target=names[1],
        latency_s=float(end["latency_s"]),
        bandwidth_bytes_per_s=float(end["bandwidth_bytes_per_s"]),
        source_byte_s=end.get("send_byte_s"),
        target_byte_s=other.get("receive_byte_s"),
    )
