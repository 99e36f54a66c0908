"""A few links of many, measured again: each node with the next, in two or three rounds of disjoint pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from skyctl.probe.fleet import Fleet, Member
from skyctl.probe.pairs import CONNECT_S, MEASURE_S, faster, measure_round
from skyctl.records.profile import LinkProfile

T = TypeVar("T")
AGAIN = 6
"""So many pairs at most that are not as they were are measured once more, alone."""


def ring(players: Sequence[T]) -> list[list[tuple[T, T]]]:
    """Each with the next, the last with the first, each at most once a round: 2 rounds, 3 for odd n."""
    count = len(players)
    pairs = [(players[i], players[(i + 1) % count]) for i in range(count)] if count > 2 else []
    if count == 2:
        pairs = [(players[0], players[1])]
    last = [pairs.pop()] if len(pairs) % 2 and len(pairs) > 1 else []
    return [found for found in (pairs[::2], pairs[1::2], last) if found]


def measure_ring(
    fleet: Fleet,
    addresses: Mapping[str, str],
    holds: Callable[[LinkProfile], bool],
    on_round: Callable[[int, int], None],
) -> list[LinkProfile]:
    """The ring's links in both directions.

    Args:
        holds: whether a link is still what it was. A pair where it is not is measured again, alone: others of
            its round may have shared a line with it.
    """
    first: dict[str, Member] = {}
    for member in fleet.alive():
        first.setdefault(member.node.name, member)
    schedule = ring(list(first.values()))
    found: dict[tuple[str, str], LinkProfile] = {}
    for number, pairs in enumerate(schedule):
        on_round(number, len(schedule))
        found |= measure_round(fleet, pairs, addresses, connect_s=CONNECT_S, measure_s=MEASURE_S)
    changed = {tuple(sorted(key)) for key, link in found.items() if not holds(link)}
    for a, b in sorted(changed)[:AGAIN]:
        pair = [(first[a], first[b])]
        alone = measure_round(fleet, pair, addresses, connect_s=CONNECT_S, measure_s=MEASURE_S)
        found |= {key: faster(found[key], link) for key, link in alone.items()}
    return list(found.values())
