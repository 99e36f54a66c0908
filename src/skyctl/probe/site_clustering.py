"""Sites: which nodes are near to each other, from the links measured. Pure.

Single linkage (Sibson 1973) with a gap rule. By latency: sites end where the shortest way to one more node is
suddenly several times as long. Then, within each, by rate: two nodes belong together where their link carries
at least half of what both their ends have been seen to carry; so a slow node is no site, and nodes behind one
slow uplink are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product
from statistics import median

from skyctl.records.profile import LinkProfile, SiteProfile

LinksBetween = Mapping[tuple[str, str], LinkProfile]
SiteNames = list[list[str]]

GAP_RATIO = 3.0
"""Between sites it is so many times as far as within them."""
NEAR_S = 0.25e-3
"""A shorter latency than this counts as this: on a fast network a few packets' time is no gap."""
FAR_S = 3e-3
"""Nodes that are all this far from each other are sites of their own, with no gap to be seen."""
SAME_SITE_SHARE = 0.5
"""Two nodes whose link carries this part of what both can do are not apart by rate."""


def find_sites(names: Sequence[str], links: LinksBetween) -> SiteNames:
    """The sites in the order of their first nodes, each in the order of ``names``.

    Nodes that no measured link joins are apart.
    """
    ways = {pair: way for pair, way in _pair_latencies(links).items() if set(pair) <= set(names)}
    near_s = site_latency_s(_linkage_heights(names, ways))
    near = [pair for pair, way in ways.items() if way <= near_s]
    sites = []
    for site in _connected_nodes(names, near):
        sites += _split_by_rate(site, links)
    return sorted(sites, key=lambda site: names.index(site[0]))


def site_latency_s(heights: Sequence[float]) -> float:
    """The latency up to which nodes are of one site.

    Args:
        heights: at which latencies single linkage joins nodes, in any order.
    """
    ordered = sorted(heights)
    if ordered and ordered[0] >= FAR_S:
        return 0.0
    for lower, upper in pairwise(ordered):
        if upper >= GAP_RATIO * max(lower, NEAR_S):
            return lower
    return float("inf")


def best_rates(links: LinksBetween) -> dict[str, float]:
    """By node, the best rate seen both ways with one other node, bytes per second."""
    return _best_of_pairs(_pair_rates(links))


def _best_of_pairs(rates: Mapping[tuple[str, str], float]) -> dict[str, float]:
    best: dict[str, float] = {}
    for pair, rate in rates.items():
        for name in pair:
            best[name] = max(best.get(name, 0.0), rate)
    return best


def estimate_links(
    sites: SiteNames, links: LinksBetween, alone: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], LinkProfile]:
    """Every link between two sites, corrected or filled in by the pair that was measured alone for them.

    A link carries what its source sends, its target receives and that pair got, whichever is least. A
    measured one that got clearly less was disturbed by others of its round, over an uplink that they share.

    Args:
        alone: the pairs measured with no other at the same time between their sites, either way round.

    Returns:
        The links to put in place of some of ``links``, and those that were missing.
    """
    place = {name: number for number, site in enumerate(sites) for name in site}
    out, into = best_rates_out_and_in(links.values())
    trusted = {way for a, b in alone for way in ((a, b), (b, a))}
    between: dict[tuple[int, int], float] = {}
    delays: dict[tuple[int, int], list[float]] = {}
    for way, link in links.items():
        if link.latency_s is None or not set(way) <= set(place):
            continue
        ends = place[way[0]], place[way[1]]
        delays.setdefault(ends, []).append(link.latency_s)
        if way in trusted and link.bandwidth_bytes_per_s is not None:
            between[ends] = max(between.get(ends, 0.0), link.bandwidth_bytes_per_s)
    estimated = {}
    for source, target in product(place, place):
        way, ends = (source, target), (place[source], place[target])
        if ends[0] == ends[1] or way in trusted:
            continue
        if ends in between:
            rate = min(out.get(source, between[ends]), into.get(target, between[ends]), between[ends])
            filled = _estimated_link(way, links.get(way), rate, median(delays[ends]))
            if filled is not None:
                estimated[way] = filled
        elif way not in links:
            reason = "not measured, and no other pair of their sites gave figures"
            estimated[way] = LinkProfile(source=source, target=target, error=reason)
    return estimated


DISTURBED_SHARE = 0.93
"""A link that got less than this part of what it should carry is replaced."""


def _estimated_link(
    way: tuple[str, str], link: LinkProfile | None, rate: float, latency_s: float
) -> LinkProfile | None:
    if link is None:
        return LinkProfile(
            source=way[0], target=way[1], latency_s=latency_s, bandwidth_bytes_per_s=rate, estimated=True
        )
    if link.bandwidth_bytes_per_s is None or link.bandwidth_bytes_per_s >= DISTURBED_SHARE * rate:
        return None
    return link.model_copy(update={"bandwidth_bytes_per_s": rate, "estimated": True})


def name_sites(sites: SiteNames, groups: Mapping[str, Sequence[str]]) -> list[SiteProfile]:
    """With names: that of the group which has just these nodes, else s1, s2, …"""
    profiles = []
    for number, site in enumerate(sites, 1):
        same = [name for name, members in groups.items() if set(members) == set(site)]
        fallback = f"s{number}"
        while fallback in groups:
            fallback += "'"
        profiles.append(SiteProfile(name=same[0] if same else fallback, nodes=tuple(site)))
    return profiles


def _split_by_rate(site: list[str], links: LinksBetween) -> SiteNames:
    members = set(site)
    rates = {pair: rate for pair, rate in _pair_rates(links).items() if set(pair) <= members}
    best = _best_of_pairs(rates)
    # Pairs without a rate, where a latency joined them, don't tell them apart.
    return _connected_nodes(
        site, [p for p, rate in rates.items() if rate >= SAME_SITE_SHARE * min(best[p[0]], best[p[1]])]
    )


def _pair_latencies(links: LinksBetween) -> dict[tuple[str, str], float]:
    """By pair, the lesser of both ways: waits only ever add."""
    return _lesser_of_both_ways({way: link.latency_s for way, link in links.items() if not link.estimated})


def _pair_rates(links: LinksBetween) -> dict[tuple[str, str], float]:
    """By pair, the lesser rate of both ways."""
    measured = {way: link for way, link in links.items() if not link.estimated}
    return _lesser_of_both_ways({way: link.bandwidth_bytes_per_s for way, link in measured.items()})


def _lesser_of_both_ways(figures: Mapping[tuple[str, str], float | None]) -> dict[tuple[str, str], float]:
    lesser: dict[tuple[str, str], float] = {}
    for (a, b), figure in figures.items():
        if a != b and figure is not None:
            pair = min((a, b), (b, a))
            lesser[pair] = min(figure, lesser.get(pair, figure))
    return lesser


def best_rates_out_and_in(links: Iterable[LinkProfile]) -> tuple[dict[str, float], dict[str, float]]:
    """By node, the best rate it was seen to send at, and to receive at, with other nodes."""
    out: dict[str, float] = {}
    into: dict[str, float] = {}
    for link in links:
        if link.source != link.target and link.bandwidth_bytes_per_s is not None:
            out[link.source] = max(out.get(link.source, 0.0), link.bandwidth_bytes_per_s)
            into[link.target] = max(into.get(link.target, 0.0), link.bandwidth_bytes_per_s)
    return out, into


def _linkage_heights(names: Sequence[str], ways: Mapping[tuple[str, str], float]) -> list[float]:
    """The latencies at which single linkage joins (the minimum spanning forest's edges; Kruskal)."""
    parent = {name: name for name in names}
    heights = []
    for pair in sorted(ways, key=lambda pair: (ways[pair], pair)):
        a, b = (_find_root(parent, name) for name in pair)
        if a != b:
            parent[a] = b
            heights.append(ways[pair])
    return heights


def _connected_nodes(names: Sequence[str], pairs: Iterable[tuple[str, str]]) -> SiteNames:
    parent = {name: name for name in names}
    for pair in pairs:
        a, b = (_find_root(parent, name) for name in pair)
        parent[a] = b
    components: dict[str, list[str]] = {}
    for name in names:
        components.setdefault(_find_root(parent, name), []).append(name)
    return list(components.values())


def _find_root(parent: dict[str, str], name: str) -> str:
    while parent[name] != name:
        parent[name] = parent[parent[name]]
        name = parent[name]
    return name
