"""What the nodes of one site share towards all others: two flows at once, against the same flows alone.

Pairwise rates don't tell it. Each flow goes between another node of the site and another one outside, where
possible at two different other sites, so that what they have in common is this site's uplink. One direction
at a time; where two flows get clearly less together than the links say, both are measured alone the same way
and then together once more before the site is said to share anything. Where only two sites exist, the one
path between them is named once, after the first of them that has two nodes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyctl.probe.fleet import Fleet, Member
from skyctl.probe.lines import Direction, Flow, Rates, shared_rate, together
from skyctl.records.profile import LinkProfile, SiteProfile, UplinkProfile

MEASURE_S = 0.8
SETTLE_S = 0.15
MOST_SETTLE_S = 0.8
MESSAGES = 48
MOST_BYTES = 128 << 20
LEAST_MESSAGE_BYTES = 512
CONNECT_S = 10.0
TRANSFER_S = 15.0
FLOWS = 2

Way = tuple[str, str]


@dataclass(frozen=True)
class Trial:
    """One site's direction, and the flows (source, target) that show it; no node is in two of them."""

    site: str
    direction: Direction
    ways: tuple[Way, ...]


def trials(sites: Sequence[SiteProfile], links: Rates) -> list[Trial]:
    """For every site with two nodes and two nodes outside, both directions.

    The flows are those that ask for most, those with different other sites before a second with the same.
    """
    found: list[Trial] = []
    able = [site for site in sites if len(site.nodes) > 1]
    for site in able[:1] if len(sites) == 2 else able:
        directions: tuple[Direction, ...] = ("out", "in")
        for direction in directions:
            chosen = _chosen(site, sites, links, direction)
            if len(chosen) == FLOWS:
                found.append(Trial(site.name, direction, tuple(chosen)))
    return found


def _chosen(site: SiteProfile, sites: Sequence[SiteProfile], links: Rates, direction: Direction) -> list[Way]:
    place = {name: other.name for other in sites for name in other.nodes}
    ways = [
        way
        for mine in site.nodes
        for other in place
        if place[other] != site.name and (way := _way(mine, other, direction)) in links
    ]
    ways.sort(key=lambda way: -(links[way].bandwidth_bytes_per_s or 0.0))
    end = 1 if direction == "out" else 0
    chosen: list[Way] = []
    for apart in (True, False):
        for way in ways:
            busy = {name for taken in chosen for name in taken}
            used = {place[taken[end]] for taken in chosen}
            if len(chosen) < FLOWS and not busy & set(way) and not (apart and place[way[end]] in used):
                chosen.append(way)
    return chosen


def measure_uplinks(
    fleet: Fleet,
    addresses: Mapping[str, str],
    links: Sequence[LinkProfile],
    sites: Sequence[SiteProfile],
    on_round: Callable[[int, int], None] = lambda _done, _of: None,
    *,
    connect_s: float = CONNECT_S,
    transfer_s: float = TRANSFER_S,
) -> tuple[list[UplinkProfile], dict[str, str]]:
    """The uplinks that are shared, in the order of the sites.

    Args:
        addresses: by node, the address at which its peers reach it; nodes without one are left out.
        links: what each pair carries alone, filled in ones among them.

    Returns:
        The uplinks, and by site why its uplink could not be measured. That fails no node.
    """
    members: dict[str, Member] = {}
    for member in fleet.alive():
        if member.node.name in addresses:
            members.setdefault(member.node.name, member)
    rates = {
        (link.source, link.target): link
        for link in links
        if link.latency_s is not None
        and link.bandwidth_bytes_per_s is not None
        and {link.source, link.target} <= set(members)
    }
    player = _Player(fleet, members, addresses, rates, connect_s, transfer_s)
    todo = trials(sites, rates)
    found: list[UplinkProfile] = []
    reasons: dict[str, str] = {}
    for number, trial in enumerate(todo):
        on_round(number, len(todo))
        outcome = _judged(player, trial)
        if isinstance(outcome, str):
            reasons[trial.site] = outcome
        elif outcome is not None:
            found.append(outcome)
    return found, reasons


def _judged(player: _Player, trial: Trial) -> UplinkProfile | str | None:
    """What the site shares in that direction, None where nothing, or why that is not known."""
    both = player.play(trial.ways)
    if isinstance(both, str):
        return both
    said = [player.links[way].bandwidth_bytes_per_s or 0.0 for way in trial.ways]
    if shared_rate(both, said, 0.0) is None:
        return None
    singles: list[float] = []
    for way in trial.ways:
        alone = player.play((way,))
        if isinstance(alone, str):
            return alone
        singles.append(alone)
    again = player.play(trial.ways)
    if isinstance(again, str):
        return again
    rate = shared_rate(max(both, again), singles, max(singles))
    if rate is None:
        return None
    return UplinkProfile(
        site=trial.site, direction=trial.direction, bandwidth_bytes_per_s=rate, pairs=trial.ways
    )


class _Player:
    """Plays flows between disjoint pairs at the same time: each source waits for the launcher's go."""

    def __init__(
        self,
        fleet: Fleet,
        members: Mapping[str, Member],
        addresses: Mapping[str, str],
        links: Rates,
        connect_s: float,
        transfer_s: float,
    ) -> None:
        self.links = links
        self._fleet, self._members, self._addresses = fleet, members, addresses
        self._limits = {"timeout_s": connect_s, "transfer_s": transfer_s}
        self._limit_s = 2 * connect_s + transfer_s
        self._silent: set[str] = set()
        self._ways: dict[str, Way] = {}
        self._secrets: dict[str, str] = {}
        self._bytes: dict[str, int] = {}
        self._ready: set[str] = set()
        self._answers: dict[str, dict[str, Any]] = {}

    def play(self, ways: Sequence[Way]) -> float | str:
        """Bytes per second of all the flows while all ran, or why there is no such figure."""
        names = [name for way in ways for name in way]
        gone = [name for name in names if name in self._silent or name in self._fleet.failures]
        if gone:
            return f"node {gone[0]} answers no more"
        settle = self._settle_s(ways)
        self._ways = {way[0]: way for way in ways}
        self._secrets = {way[0]: secrets.token_hex(16) for way in ways}
        self._bytes = {way[0]: self._message_bytes(way, settle) for way in ways}
        self._ready, self._answers = set(), {}
        for source, target in ways:
            self._order(source, target, {"role": "hub", "hold": True}, sends=True)
        members = [self._members[name] for name in names]
        self._fleet.wait(members, "line", self._limit_s, self._heard, fatal=False)
        self._silent |= {name for name in names if name not in self._answers}
        for name in names:
            answer = self._answers.get(name)
            if answer is None or "error" in answer:
                return f"{name}: " + ("no answer in time" if answer is None else str(answer["error"]))
        flows = [
            Flow([float(at) for at in self._answers[target]["arrivals"][source]], self._bytes[source])
            for source, target in ways
        ]
        rate = together(flows, settle)
        return "the flows were never under way together" if rate is None else rate

    def _settle_s(self, ways: Sequence[Way]) -> float:
        latency_s = max(self.links[way].latency_s or 0.0 for way in ways)
        return min(MOST_SETTLE_S, max(SETTLE_S, 16 * latency_s))

    def _message_bytes(self, way: Way, settle: float) -> int:
        rate = self.links[way].bandwidth_bytes_per_s or 0.0
        total = min(MOST_BYTES, rate * (settle + MEASURE_S))
        return max(LEAST_MESSAGE_BYTES, int(total / MESSAGES))

    def _order(self, name: str, peer: str, more: dict[str, Any], *, sends: bool) -> None:
        source = name if sends else peer
        member = self._members[name]
        member.phase = f"the uplink between {' and '.join(self._ways[source])}"
        pair = {
            "peer": peer,
            "secret": self._secrets[source],
            "messages": MESSAGES,
            "send_bytes": self._bytes[source] if sends else 1,
            "receive_bytes": 1 if sends else self._bytes[source],
        }
        order: dict[str, Any] = {"op": "line", "hub": source, "address": self._addresses[name]}
        self._fleet.send(member, order | {"pairs": [pair]} | self._limits | more)

    def _heard(self, member: Member, event: dict[str, Any]) -> None:
        name, source = member.node.name, str(event.get("hub"))
        way = self._ways.get(source)
        if way is None or member is not self._members[name] or name not in way:
            return  # not of this trial
        kind = event.get("event")
        if kind == "line":
            self._answers[name] = event
        elif kind == "line-listening":
            more = {"role": "peer", "host": event["address"], "port": event["ports"][0]}
            self._order(way[1], source, more, sends=False)
        elif kind == "line-ready":
            self._ready.add(source)
            gave_up = self._answers.keys() & self._ways.keys()  # a source that waits has not answered
            if self._ready == set(self._ways) and not gave_up:
                for other in self._ways:
                    self._fleet.send(self._members[other], {"op": "go"})


def _way(mine: str, other: str, direction: Direction) -> Way:
    return (mine, other) if direction == "out" else (other, mine)
