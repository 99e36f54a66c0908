"""Links of all pairs of nodes in rounds of disjoint pairs, over the processes that measured the layers.

Pairs of one round that cross the same uplink disturb each other. So nodes are put into sites by what was
measured, and for every two sites one pair is measured alone (``site_clustering.estimate_links`` corrects the
others by it).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from itertools import permutations
from statistics import median
from typing import Any, Literal, TypeVar

from skyctl.errors import ProtocolError
from skyctl.probe.device_probes import DeviceProbe, DeviceProbes
from skyctl.probe.node.probe_requests import LinkRequest
from skyctl.probe.pairings import (
    NodePair,
    disjoint_pairs,
    exploratory_pairs,
    pairs_within_sites,
    round_robin,
    site_crossings,
)
from skyctl.probe.site_clustering import (
    SiteNames,
    best_rates,
    best_rates_out_and_in,
    estimate_links,
    find_sites,
)
from skyctl.records.profile import LinkProfile

# One round of links: disjoint pairs of processes at the same time, each in both directions.

CONNECT_S = 10.0
MEASURE_S = 60.0


def measure_round(
    probes: DeviceProbes,
    pairs: Sequence[tuple[DeviceProbe, DeviceProbe]],
    addresses: Mapping[str, str],
) -> dict[tuple[str, str], LinkProfile]:
    """One round, its pairs at the same time. A pair that fails has the reason in both directions."""
    secret = secrets.token_hex(16)
    answers: dict[int, dict[str, Any]] = {}
    peers: dict[int, DeviceProbe] = {}
    asked: list[DeviceProbe] = []

    def ask(
        member: DeviceProbe, peer: DeviceProbe, role: str, host: str | None = None, port: int | None = None
    ) -> None:
        member.phase = f"its link with {peer.node.name}"
        address = addresses[member.node.name]
        probes.send(member, LinkRequest(peer.node.name, secret, address, role, CONNECT_S, host, port))

    def handle(member: DeviceProbe, event: dict[str, Any]) -> None:
        peer = peers.get(id(member))
        if peer is None:
            return
        if event.get("event") == "listening":
            if all(probe is not member for probe in asked) or any(probe is peer for probe in expected):
                name = member.node.name
                raise ProtocolError(f"node {name} listens for a link that it was not asked for", node=name)
            ask(peer, member, "connect", event["address"], event["port"])
            expected.append(peer)
        elif event.get("event") == "link":
            if "error" not in event and not {"latency_s", "bandwidth_bytes_per_s"} <= set(event):
                name = member.node.name
                raise ProtocolError(f"node {name} gave neither figures of a link nor an error", node=name)
            answers[id(member)] = event

    expected: list[DeviceProbe] = []
    for a, b in pairs:
        if a.node.name in probes.failures or b.node.name in probes.failures:
            continue
        peers[id(a)], peers[id(b)] = b, a
        ask(a, b, "listen")
        asked.append(a)
    probes.wait(asked, "link", CONNECT_S + MEASURE_S, handle)
    probes.wait([m for m in expected if id(m) not in answers], "link", CONNECT_S + MEASURE_S, handle)
    links: dict[tuple[str, str], LinkProfile] = {}
    for a, b in pairs:
        if a.node.name in probes.failures or b.node.name in probes.failures:
            continue
        ends = [answers.get(id(a), {}), answers.get(id(b), {})]
        errors = [str(end["error"]) for end in ends if end.get("error")]
        for source, target, (end, other) in ((a, b, ends), (b, a, ends[::-1])):
            links[source.node.name, target.node.name] = _link_profile(source, target, end, other, errors)
    return links


def better_link(first: LinkProfile, second: LinkProfile) -> LinkProfile:
    """The better of two measurements of one direction, in rate and in latency."""
    if first.bandwidth_bytes_per_s is None or second.bandwidth_bytes_per_s is None:
        return second if first.bandwidth_bytes_per_s is None else first
    latencies = [link.latency_s for link in (first, second) if link.latency_s is not None]
    return first.model_copy(
        update={
            "bandwidth_bytes_per_s": max(first.bandwidth_bytes_per_s, second.bandwidth_bytes_per_s),
            "latency_s": min(latencies, default=None),
        }
    )


def _link_profile(
    source: DeviceProbe,
    target: DeviceProbe,
    end: dict[str, Any],
    other: dict[str, Any],
    errors: Sequence[str],
) -> LinkProfile:
    names = source.node.name, target.node.name
    if "latency_s" not in end or "bandwidth_bytes_per_s" not in end:
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


LinkSelection = Literal["all", "sites", "none"]
LinksByEnds = dict[tuple[str, str], LinkProfile]
MOST_NODES_ALL_PAIRS = 32
"""With more nodes than this, only sites are compared unless all pairs are asked for."""
SUSPECT_SHARE = 0.7
"""A pair slower than this part of what both its ends can do is measured once more, alone."""
MOST_SUSPECTS = 12
"""Pairs within sites measured again at most, the slowest first: one at a time takes a second or two each."""


def default_link_selection(nodes: int) -> LinkSelection:
    """The links that are measured if nothing is said."""
    return "all" if nodes <= MOST_NODES_ALL_PAIRS else "sites"


def measure_links(
    probes: DeviceProbes,
    addresses: Mapping[str, str],
    on_round: Callable[[int, int], None] = lambda _done, _of: None,
    how: LinkSelection = "all",
) -> tuple[list[LinkProfile], SiteNames]:
    """The links in both directions, one pair of devices within each node that has several, and the sites.

    Args:
        addresses: by node, the address at which its peers reach it.
        on_round: called with (rounds done, rounds in all as far as is known).
        how: ``all`` pairs of nodes in n − 1 rounds; or all pairs within ``sites``, and between two sites one
            that represents the others; or ``none``. With ``sites``, of the pairs that one machine's loopback
            carries, a ring is measured, and the others are its medians.

    Returns:
        The links by node names, in the order of the nodes (within a node source and target are the same);
        the sites' nodes, none where no link was measured.
    """
    if how == "none":
        return [], []
    return _LinkSurvey(probes, addresses, on_round).run(how)


class _LinkSurvey:
    """One measurement of the links: what is known so far, and which pairs were alone between their sites."""

    def __init__(
        self,
        probes: DeviceProbes,
        addresses: Mapping[str, str],
        on_round: Callable[[int, int], None],
    ) -> None:
        self._fleet, self._addresses, self._on_round = probes, addresses, on_round
        self._first = probes.first_of_nodes()
        self._second: dict[str, DeviceProbe] = {}
        for member in probes.alive():
            if member is not self._first[member.node.name]:
                self._second.setdefault(member.node.name, member)
        self._links: LinksByEnds = {}
        self._alone: list[NodePair] = []
        self._done = 0

    def run(self, how: LinkSelection) -> tuple[list[LinkProfile], SiteNames]:
        if how == "all":
            schedule = round_robin(list(self._first))
            for pairs in schedule:
                self._play(pairs, len(schedule) - self._done)
        else:
            self._measure_loopback()
        sites = self._compare()
        if self._second:
            self._keep([(self._first[name], member) for name, member in self._second.items()], 1)
        if len(sites) > 1:
            self._links |= estimate_links(sites, self._links, self._alone)
        self._repeat(sites)
        order = {name: index for index, name in enumerate(self._first)}
        ways = sorted(self._links, key=lambda way: (order[way[0]], order[way[1]]))
        return [self._links[way] for way in ways], sites

    def _measure_loopback(self) -> None:
        """Each node with the next one of its machine; what they get is the other pairs' figure, too."""
        machines: dict[str, list[str]] = {}
        for name, member in self._first.items():
            boot_id = member.facts.get("boot_id")
            if boot_id is not None and ip_address(self._addresses[name]).is_loopback:
                machines.setdefault(boot_id, []).append(name)
        for names in machines.values():
            rounds = ring_rounds(names)
            for number, pairs in enumerate(rounds):
                self._play(pairs, len(rounds) - number)
            own = [link for way, link in self._links.items() if set(way) <= set(names)]
            rates = [link.bandwidth_bytes_per_s for link in own if link.bandwidth_bytes_per_s is not None]
            delays_s = [link.latency_s for link in own if link.latency_s is not None]
            left = (way for way in permutations(names, 2) if way not in self._links)
            for source, target in left if rates and delays_s else ():
                self._links[source, target] = LinkProfile(
                    source=source,
                    target=target,
                    latency_s=median(delays_s),
                    bandwidth_bytes_per_s=median(rates),
                    estimated=True,
                )

    def _compare(self) -> SiteNames:
        """Until all pairs within the sites are known, and one between every two was measured alone."""
        while True:
            names = [name for name in self._first if name not in self._fleet.failures]
            measured = {frozenset(way) for way in self._links if way[0] != way[1]}
            sites = find_sites(names, self._links)
            explore, within = exploratory_pairs(sites, measured), pairs_within_sites(sites, measured)
            if explore or within:
                # Nodes that have nobody to explore with get on with their own site.
                pairs = disjoint_pairs(explore + within)
                self._play(pairs, max(1, len(sites) - 1 if explore else max(map(len, sites)) - 1))
                continue
            broken = {frozenset(way) for way, link in self._links.items() if link.error is not None}
            heard = {frozenset(pair) for pair in self._alone}
            lonely = site_crossings(sites, best_rates(self._links), broken, heard)
            if not lonely:
                return sites
            for number, pairs in enumerate(lonely):
                self._alone += pairs
                self._play(pairs, len(lonely) - number, better=True)

    def _repeat(self, sites: SiteNames) -> None:
        """Pairs within sites that others of their round may have disturbed, one at a time."""
        place = {name: number for number, site in enumerate(sites) for name in site}
        links = [link for (a, b), link in self._links.items() if place.get(a) == place.get(b)]
        suspects = suspect_pairs(links)[:MOST_SUSPECTS]
        for number, pair in enumerate(suspects):
            self._play([pair], len(suspects) - number, better=True)

    def _play(self, pairs: Sequence[NodePair], left: int, *, better: bool = False) -> None:
        self._keep([(self._first[a], self._first[b]) for a, b in pairs], left, better=better)

    def _keep(
        self, pairs: Sequence[tuple[DeviceProbe, DeviceProbe]], left: int, *, better: bool = False
    ) -> None:
        """One round. ``better``: of what was known before and what was seen now, the better stays."""
        self._on_round(self._done, self._done + left)
        links = measure_round(self._fleet, pairs, self._addresses)
        for way, link in links.items():
            before = self._links.get(way) if better else None
            self._links[way] = link if before is None else better_link(before, link)
        self._done += 1


def suspect_pairs(links: Sequence[LinkProfile]) -> list[tuple[str, str]]:
    """Pairs that may have been slowed by others of their round, over an uplink that they share.

    Those, the slowest first, of which a direction is much slower than both its ends have been seen to be.
    """
    out, into = best_rates_out_and_in(links)
    suspects: dict[tuple[str, str], float] = {}
    for link in links:
        rate = link.bandwidth_bytes_per_s
        if link.source == link.target or rate is None:
            continue
        if rate < SUSPECT_SHARE * min(out[link.source], into[link.target]):
            pair = min((link.source, link.target), (link.target, link.source))
            suspects[pair] = min(rate, suspects.get(pair, rate))
    return sorted(suspects, key=lambda pair: (suspects[pair], pair))


# A few links of many, measured again: each node with the next, in two or three rounds of disjoint pairs.

T = TypeVar("T")
MOST_CHANGED = 6
"""So many pairs at most that are not as they were are measured once more, alone."""


def ring_rounds(players: Sequence[T]) -> list[list[tuple[T, T]]]:
    """Each with the next, the last with the first, each at most once a round: 2 rounds, 3 for odd n."""
    count = len(players)
    pairs = [(players[i], players[(i + 1) % count]) for i in range(count)] if count > 2 else []
    if count == 2:
        pairs = [(players[0], players[1])]
    last = [pairs.pop()] if len(pairs) % 2 and len(pairs) > 1 else []
    return [meetings for meetings in (pairs[::2], pairs[1::2], last) if meetings]


def measure_ring(
    probes: DeviceProbes,
    addresses: Mapping[str, str],
    holds: Callable[[LinkProfile], bool],
    on_round: Callable[[int, int], None],
) -> list[LinkProfile]:
    """The ring's links in both directions.

    Args:
        holds: whether a link is still what it was. A pair where it is not is measured again, alone: others of
            its round may have shared a line with it.
    """
    first = probes.first_of_nodes()
    schedule = ring_rounds(list(first.values()))
    links: dict[tuple[str, str], LinkProfile] = {}
    for number, pairs in enumerate(schedule):
        on_round(number, len(schedule))
        links |= measure_round(probes, pairs, addresses)
    changed = {tuple(sorted(key)) for key, link in links.items() if not holds(link)}
    for a, b in sorted(changed)[:MOST_CHANGED]:
        pair = [(first[a], first[b])]
        alone = measure_round(probes, pair, addresses)
        links |= {key: better_link(links[key], link) for key, link in alone.items()}
    return list(links.values())
