"""Links of all pairs of nodes in rounds of disjoint pairs, over the processes that measured the layers.

Pairs of one round that cross the same uplink disturb each other. So nodes are put into sites by what was
measured, and for every two sites one pair is measured alone (``sites.fill_in`` corrects the others by it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from skyctl.probe.fleet import Fleet, Member
from skyctl.probe.pairs import CONNECT_S, MEASURE_S, faster, measure_round
from skyctl.probe.rounds import Pair, crossings, disjoint, exploring, inside, rounds
from skyctl.probe.sites import Sites, fill_in, find_sites, speeds
from skyctl.records.profile import LinkProfile

How = Literal["all", "sites", "none"]
Found = dict[tuple[str, str], LinkProfile]
MOST_ALL = 32
"""With more nodes than this, only sites are compared unless all pairs are asked for."""
SUSPECT = 0.7
"""A pair slower than this part of what both its ends can do is measured once more, alone."""
AGAIN = 12
"""Pairs within sites measured again at most, the slowest first: one at a time takes a second or two each."""


def default_how(nodes: int) -> How:
    """What is measured where nothing is said."""
    return "all" if nodes <= MOST_ALL else "sites"


def measure_links(
    fleet: Fleet,
    addresses: Mapping[str, str],
    on_round: Callable[[int, int], None] = lambda _done, _of: None,
    how: How = "all",
    *,
    connect_s: float = CONNECT_S,
    measure_s: float = MEASURE_S,
) -> tuple[list[LinkProfile], Sites]:
    """The links in both directions, one pair of devices within each node that has several, and the sites.

    Args:
        addresses: by node, the address at which its peers reach it.
        on_round: called with (rounds done, rounds in all as far as is known).
        how: ``all`` pairs of nodes in n − 1 rounds; or all pairs within ``sites``, and between two sites one
            that stands for the others; or ``none``.

    Returns:
        The links by node names, in the order of the nodes (within a node source and target are the same);
        the sites' nodes, none where no link was measured.
    """
    if how == "none":
        return [], []
    return _Survey(fleet, addresses, on_round, connect_s, measure_s).run(how)


class _Survey:
    """One measurement of the links: what is known so far, and which pairs were alone between their sites."""

    def __init__(
        self,
        fleet: Fleet,
        addresses: Mapping[str, str],
        on_round: Callable[[int, int], None],
        connect_s: float,
        measure_s: float,
    ) -> None:
        self._fleet, self._addresses, self._on_round = fleet, addresses, on_round
        self._connect_s, self._measure_s = connect_s, measure_s
        self._first: dict[str, Member] = {}
        self._second: dict[str, Member] = {}
        for member in fleet.alive():
            if member.node.name not in self._first:
                self._first[member.node.name] = member
            else:
                self._second.setdefault(member.node.name, member)
        self._links: Found = {}
        self._alone: list[Pair] = []
        self._done = 0

    def run(self, how: How) -> tuple[list[LinkProfile], Sites]:
        if how == "all":
            schedule = rounds(list(self._first))
            for pairs in schedule:
                self._play(pairs, len(schedule) - self._done)
        sites = self._compare()
        if self._second:
            self._keep([(self._first[name], member) for name, member in self._second.items()], 1)
        if len(sites) > 1:
            self._links |= fill_in(sites, self._links, self._alone)
        self._repeat(sites)
        order = {name: index for index, name in enumerate(self._first)}
        ways = sorted(self._links, key=lambda way: (order[way[0]], order[way[1]]))
        return [self._links[way] for way in ways], sites

    def _compare(self) -> Sites:
        """Until all pairs within the sites are known, and one between every two was measured alone."""
        while True:
            names = [name for name in self._first if name not in self._fleet.failures]
            known = {frozenset(way) for way in self._links if way[0] != way[1]}
            sites = find_sites(names, self._links)
            explore, within = exploring(sites, known), inside(sites, known)
            if explore or within:
                # Nodes that have nobody to explore with get on with their own site.
                pairs = disjoint(explore + within)
                self._play(pairs, max(1, len(sites) - 1 if explore else max(map(len, sites)) - 1))
                continue
            broken = {frozenset(way) for way, link in self._links.items() if link.error is not None}
            heard = {frozenset(pair) for pair in self._alone}
            lonely = crossings(sites, speeds(self._links), broken, heard)
            if not lonely:
                return sites
            for number, pairs in enumerate(lonely):
                self._alone += pairs
                self._play(pairs, len(lonely) - number, better=True)

    def _repeat(self, sites: Sites) -> None:
        """Pairs within sites that others of their round may have disturbed, one at a time."""
        place = {name: number for number, site in enumerate(sites) for name in site}
        links = [link for (a, b), link in self._links.items() if place.get(a) == place.get(b)]
        suspects = again(links)[:AGAIN]
        for number, pair in enumerate(suspects):
            self._play([pair], len(suspects) - number, better=True)

    def _play(self, pairs: Sequence[Pair], left: int, *, better: bool = False) -> None:
        self._keep([(self._first[a], self._first[b]) for a, b in pairs], left, better=better)

    def _keep(self, pairs: Sequence[tuple[Member, Member]], left: int, *, better: bool = False) -> None:
        """One round. ``better``: of what was known before and what was seen now, the better stays."""
        self._on_round(self._done, self._done + left)
        found = measure_round(
            self._fleet, pairs, self._addresses, connect_s=self._connect_s, measure_s=self._measure_s
        )
        for way, link in found.items():
            known = self._links.get(way) if better else None
            self._links[way] = link if known is None else faster(known, link)
        self._done += 1


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
