"""All pairs of nodes in rounds of disjoint pairs, over the processes that measured the layers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from skyctl.probe.fleet import Fleet, Member
from skyctl.records.profile import LinkProfile

T = TypeVar("T")
CONNECT_S = 10.0
MEASURE_S = 60.0
SUSPECT = 0.7
"""A pair slower than this part of what both its ends can do is measured once more, alone."""
AGAIN = 24
"""Pairs measured again at most, the slowest first: one at a time takes a second or two each."""


def rounds(players: Sequence[T]) -> list[list[tuple[T, T]]]:
    """A round-robin tournament: every pair once, each player at most once a round.

    n players: n − 1 rounds (n rounds for odd n, one player resting in each). The circle method.
    """
    ring: list[T | None] = list(players)
    if len(ring) % 2:
        ring.append(None)
    half = len(ring) // 2
    found = []
    for _ in range(len(ring) - 1):
        pairs = []
        for a, b in zip(ring[:half], reversed(ring[half:]), strict=True):
            if a is not None and b is not None:
                pairs.append((a, b))
        if pairs:
            found.append(pairs)
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def measure_links(
    fleet: Fleet,
    addresses: Mapping[str, str],
    on_round: Callable[[int, int], None] = lambda _done, _of: None,
    *,
    connect_s: float = CONNECT_S,
    measure_s: float = MEASURE_S,
) -> list[LinkProfile]:
    """Every pair of nodes in both directions, and one pair of devices within each node that has several.

    Args:
        addresses: by node, the address at which its peers reach it.
        on_round: called with (rounds done, rounds in all).

    Returns:
        By node names, in the order of the nodes; within a node source and target are the same.
    """
    first: dict[str, Member] = {}
    second: dict[str, Member] = {}
    for member in fleet.alive():
        if member.node.name not in first:
            first[member.node.name] = member
        else:
            second.setdefault(member.node.name, member)
    schedule = rounds(list(first.values()))
    if second:
        schedule.append([(first[name], member) for name, member in second.items()])
    found: dict[tuple[str, str], LinkProfile] = {}
    for number, pairs in enumerate(schedule):
        on_round(number, len(schedule))
        found |= _round(fleet, pairs, addresses, connect_s=connect_s, measure_s=measure_s)
    for a, b in again(list(found.values()))[:AGAIN]:
        on_round(len(schedule) - 1, len(schedule))
        alone = _round(fleet, [(first[a], first[b])], addresses, connect_s=connect_s, measure_s=measure_s)
        found |= {key: _faster(found[key], link) for key, link in alone.items()}
    order = {name: index for index, name in enumerate(first)}
    return [found[key] for key in sorted(found, key=lambda key: (order[key[0]], order[key[1]]))]


def again(links: Sequence[LinkProfile]) -> list[tuple[str, str]]:
    """Pairs that may have been slowed by others of their round, over an uplink that they share.

    Those, the slowest first, of which a direction is much slower than both its ends have been seen to be.
    """
    out: dict[str, float] = {}
    into: dict[str, float] = {}
    for link in links:
        if link.source != link.target and link.bandwidth_bytes_per_s is not None:
            out[link.source] = max(out.get(link.source, 0.0), link.bandwidth_bytes_per_s)
            into[link.target] = max(into.get(link.target, 0.0), link.bandwidth_bytes_per_s)
    found: dict[tuple[str, str], float] = {}
    for link in links:
        rate = link.bandwidth_bytes_per_s
        if link.source == link.target or rate is None:
            continue
        if rate < SUSPECT * min(out[link.source], into[link.target]):
            pair = min((link.source, link.target), (link.target, link.source))
            found[pair] = min(rate, found.get(pair, rate))
    return sorted(found, key=lambda pair: (found[pair], pair))


def _faster(one: LinkProfile, other: LinkProfile) -> LinkProfile:
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


def _round(
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
        for source, target, end in ((a, b, ends[0]), (b, a, ends[1])):
            found[source.node.name, target.node.name] = _link(source, target, end, errors)
    return found


def _link(source: Member, target: Member, end: dict[str, Any], errors: Sequence[str]) -> LinkProfile:
    names = source.node.name, target.node.name
    if "latency_s" not in end:
        reason = "; ".join(dict.fromkeys(errors)) or "the pair gave no figures"
        return LinkProfile(source=names[0], target=names[1], error=reason)
    return LinkProfile(
        source=names[0],
        target=names[1],
        latency_s=float(end["latency_s"]),
        bandwidth_bytes_per_s=float(end["bandwidth_bytes_per_s"]),
    )
