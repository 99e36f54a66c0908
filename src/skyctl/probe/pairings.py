"""The order in which nodes measure with each other: rounds of pairs, no node twice in a round. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
NodePair = tuple[str, str]
MeasuredPairs = Collection[frozenset[str]]
"""The pairs that have been measured, in both directions."""


def round_robin(players: Sequence[T]) -> list[list[tuple[T, T]]]:
    """A round-robin tournament: every pair once, each player at most once a round.

    n players: n − 1 rounds (n rounds for odd n, one player resting in each). The circle method.
    """
    ring: list[T | None] = list(players)
    if len(ring) % 2:
        ring.append(None)
    half = len(ring) // 2
    rounds = []
    for _ in range(len(ring) - 1):
        pairs = []
        for a, b in zip(ring[:half], reversed(ring[half:]), strict=True):
            if a is not None and b is not None:
                pairs.append((a, b))
        if pairs:
            rounds.append(pairs)
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def pairs_within_sites(sites: Iterable[Sequence[str]], measured: MeasuredPairs) -> list[NodePair]:
    """The pairs of nodes of one site that are not known yet, in the order of each site's tournament."""
    tournaments = [round_robin(site) for site in sites]
    longest = max((len(tournament) for tournament in tournaments), default=0)
    return [
        pair
        for number in range(longest)
        for tournament in tournaments
        for pair in (tournament[number] if number < len(tournament) else [])
        if frozenset(pair) not in measured
    ]


def exploratory_pairs(sites: Sequence[Sequence[str]], measured: MeasuredPairs) -> list[NodePair]:
    """A round that compares sites of which no two nodes have met yet: as many pairs as there are, disjoint.

    Those that have met the fewest nodes go first. Empty when every two sites have been compared.
    """
    met: dict[str, int] = {name: 0 for site in sites for name in site}
    compared: set[frozenset[int]] = set()
    place = {name: number for number, site in enumerate(sites) for name in site}
    for pair in measured:
        if len(pair) == 2 and all(name in place for name in pair):
            a, b = pair
            met[a] += 1
            met[b] += 1
            compared.add(frozenset((place[a], place[b])))
    free = [sorted(site, key=lambda name: met[name]) for site in sites]
    # One site meets as many others as it has nodes free; a tournament's order spreads them.
    chosen = []
    for pairs in round_robin(list(range(len(sites)))):
        for site, other in pairs:
            if frozenset((site, other)) not in compared and free[site] and free[other]:
                chosen.append((free[site].pop(0), free[other].pop(0)))
    return chosen


def disjoint_pairs(pairs: Iterable[NodePair]) -> list[NodePair]:
    """The pairs, first come first served, that share no node with each other."""
    busy: set[str] = set()
    chosen = []
    for a, b in pairs:
        if a not in busy and b not in busy:
            busy |= {a, b}
            chosen.append((a, b))
    return chosen


def site_crossings(
    sites: Sequence[Sequence[str]],
    speed: Mapping[str, float],
    barred: MeasuredPairs = (),
    done: MeasuredPairs = (),
) -> list[list[NodePair]]:
    """For every two sites a pair that represents them, in rounds in which no site is in two of the pairs.

    So none is disturbed by another on an uplink that their sites share. The fastest nodes represent a site.
    Left out: two sites of one node each, whose only pair nothing of theirs disturbs; two sites of which a
    pair is ``done``; and pairs ``barred``.
    """
    rounds = []
    for matches in round_robin(list(range(len(sites)))):
        chosen = []
        for a, b in matches:
            pairs = [(x, y) for x in sites[a] for y in sites[b]]
            if len(pairs) == 1 or any(frozenset(pair) in done for pair in pairs):
                continue
            pairs = [pair for pair in pairs if frozenset(pair) not in barred]
            if pairs:
                chosen.append(max(pairs, key=lambda pair: _pair_speed(pair, speed)))
        if chosen:
            rounds.append(chosen)
    return rounds


def _pair_speed(pair: NodePair, speed: Mapping[str, float]) -> tuple[float, float]:
    speeds = [speed.get(name, 0.0) for name in pair]
    return min(speeds), max(speeds)
