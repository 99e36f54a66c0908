"""A node's own line: what it can receive from, and send to, two peers at once.

Pairwise rates don't tell it: a stage in the middle of a pipeline gets activations from one neighbour and
gradients from the other over one network card. So, after the pairs, every node with two peers or more is the
hub of a triple once, with all four flows at the same time, as in training. Triples that have no node in
common run in the same round.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from skyctl.probe.fleet import Fleet, Member
from skyctl.records.profile import LineProfile, LinkProfile

Direction = Literal["in", "out"]
Rates = Mapping[tuple[str, str], LinkProfile]
"""The links that have figures, by (source, target)."""

SHARED_BELOW = 0.85
"""A line is shared where two flows together get less than this part of what they get one at a time."""
AS_FAST = 0.8
"""A peer this near to the second fastest serves as well: the two together still ask for more than a line."""
MEASURE_S = 0.3
SETTLE_S = 0.1
MOST_SETTLE_S = 0.4
MESSAGES = 16
MOST_BYTES = 32 << 20
LEAST_MESSAGE_BYTES = 512
MOST_ROUNDS = 16
CONNECT_S = 10.0
TRANSFER_S = 10.0


@dataclass(frozen=True)
class Triple:
    """A hub and the two peers that it talks with."""

    hub: str
    peers: tuple[str, str]


@dataclass(frozen=True)
class Flow:
    """One flow as it came: when each message was there (seconds from the go), and a message's bytes."""

    arrivals_s: Sequence[float]
    message_bytes: int

    def passed_bytes(self, at_s: float) -> float:
        """Bytes that had come by then, each message counted as it grew, at an even pace."""
        done = bisect_left(self.arrivals_s, at_s)
        if done == len(self.arrivals_s):
            return float(done * self.message_bytes)
        before_s = self.arrivals_s[done - 1] if done else 0.0
        took_s = self.arrivals_s[done] - before_s
        return (done + (at_s - before_s) / took_s) * self.message_bytes if took_s > 0 else 0.0


def candidates(links: Rates, names: Sequence[str]) -> dict[str, list[str]]:
    """By node, the peers that can show its line, best first; none for a node with fewer than two.

    A peer counts by the direction in which it falls further behind the node's second fastest peer.
    """
    found: dict[str, list[str]] = {}
    for hub in names:
        peers = [p for p in names if p != hub and (p, hub) in links and (hub, p) in links]
        if len(peers) < 2:
            continue
        second_in = sorted((_rate(links, p, hub) for p in peers), reverse=True)[1]
        second_out = sorted((_rate(links, hub, p) for p in peers), reverse=True)[1]
        scores = {p: min(_rate(links, p, hub) / second_in, _rate(links, hub, p) / second_out) for p in peers}
        ranked = sorted(peers, key=lambda p: -scores[p])
        enough = AS_FAST * scores[ranked[1]]
        found[hub] = [p for p in ranked if scores[p] >= enough]
    return found


def triple_rounds(
    wanted: Mapping[str, Sequence[str]], most: int = MOST_ROUNDS
) -> tuple[list[list[Triple]], list[str]]:
    """Every hub once, with two of its candidates; triples of a round have no node in common.

    Returns:
        The rounds, and the hubs that ``most`` rounds have no room for.
    """
    pending = sorted(wanted, key=lambda hub: len(wanted[hub]))
    rounds: list[list[Triple]] = []
    while pending and len(rounds) < most:
        taken: set[str] = set()
        triples: list[Triple] = []
        for hub in pending:
            peers = [p for p in wanted[hub] if p not in taken]
            if hub in taken or len(peers) < 2:
                continue
            triples.append(Triple(hub, (peers[0], peers[1])))
            taken |= {hub, peers[0], peers[1]}
        rounds.append(triples)
        served = {triple.hub for triple in triples}
        pending = [hub for hub in pending if hub not in served]
    return rounds, pending


def settle_s(links: Rates, triple: Triple) -> float:
    """What is left out at the start: TCP's slow start (five round trips) and the buckets' bursts."""
    latency_s = max(links[a, b].latency_s or 0.0 for a, b in _ways(triple))
    return min(MOST_SETTLE_S, max(SETTLE_S, 10 * latency_s))


def message_bytes(rate: float, settle: float) -> int:
    """A message of a flow that would take ``settle`` and ``MEASURE_S`` seconds if it were alone."""
    total = min(MOST_BYTES, rate * (settle + MEASURE_S))
    return max(LEAST_MESSAGE_BYTES, int(total / MESSAGES))


def together(flows: Sequence[Flow], settle: float) -> float | None:
    """Bytes per second of all flows while all of them ran; None where there was no such time."""
    end_s = min(flow.arrivals_s[-1] if flow.arrivals_s else 0.0 for flow in flows)
    start_s = min(settle, end_s / 2)
    if end_s <= start_s:
        return None
    passed = sum(flow.passed_bytes(end_s) - flow.passed_bytes(start_s) for flow in flows)
    return passed / (end_s - start_s)


def shared_rate(both: float, singles: Sequence[float], fastest: float) -> float | None:
    """The line's rate where it is clearly shared, else None.

    Args:
        both: what the two flows got together.
        singles: what each gets alone.
        fastest: the most that this node gets alone in this direction; a line is no slower.
    """
    rate = max(both, fastest)
    return rate if rate < SHARED_BELOW * sum(singles) else None


def measure_lines(
    fleet: Fleet,
    addresses: Mapping[str, str],
    links: Sequence[LinkProfile],
    on_round: Callable[[int, int], None] = lambda _done, _of: None,
    *,
    connect_s: float = CONNECT_S,
    transfer_s: float = TRANSFER_S,
) -> tuple[list[LineProfile], dict[str, str]]:
    """Every node's line that is shared, in the order of the nodes, "in" before "out".

    Args:
        addresses: by node, the address at which its peers reach it; nodes without one are left out.
        links: what each pair carries alone.

    Returns:
        The lines, and by node why its line could not be measured. That fails no node.
    """
    first: dict[str, Member] = {}
    for member in fleet.alive():
        if member.node.name in addresses:
            first.setdefault(member.node.name, member)
    rates = {(k.source, k.target): k for k in links if k.latency_s is not None and k.bandwidth_bytes_per_s}
    rounds, late = triple_rounds(candidates(rates, list(first)))
    reasons = dict.fromkeys(late, f"{MOST_ROUNDS} rounds have no room for it: too few fast peers for all")
    found: dict[str, list[LineProfile]] = {}
    silent: set[str] = set()
    for number, triples in enumerate(rounds):
        on_round(number, len(rounds))
        out = silent | set(fleet.failures)
        able = [t for t in triples if not out & {t.hub, *t.peers}]
        reasons |= {t.hub: "one of the three nodes answers no more" for t in triples if t not in able}
        played = _Round(fleet, first, addresses, rates, able, connect_s, transfer_s).play()
        silent |= played.silent
        for triple in able:
            lines = played.lines(triple)
            if isinstance(lines, str):
                reasons[triple.hub] = lines
            else:
                found[triple.hub] = lines
    return [line for name in first for line in found.get(name, [])], reasons


class _Round:
    """Triples without a node in common, at the same time."""

    def __init__(
        self,
        fleet: Fleet,
        members: Mapping[str, Member],
        addresses: Mapping[str, str],
        links: Rates,
        triples: Sequence[Triple],
        connect_s: float,
        transfer_s: float,
    ) -> None:
        self._fleet, self._members, self._addresses, self._links = fleet, members, addresses, links
        self._triples = {triple.hub: triple for triple in triples}
        self._secrets = {(t.hub, p): secrets.token_hex(16) for t in triples for p in t.peers}
        self._limits = {"timeout_s": connect_s, "transfer_s": transfer_s}
        self._limit_s = 2 * connect_s + 3 * transfer_s
        self._asked: list[str] = []
        self._answers: dict[str, dict[str, Any]] = {}
        self.silent: set[str] = set()

    def play(self) -> _Round:
        """Starts the hubs, then their peers; returns when all have answered or are too late."""
        for triple in self._triples.values():
            self._order(triple.hub, triple, {"role": "hub"}, triple.peers)
        self._wait(list(self._triples))
        self._wait([name for name in self._asked if name not in self._answers])
        return self

    def lines(self, triple: Triple) -> list[LineProfile] | str:
        """The hub's shared lines, or why that is not known."""
        for name in (triple.hub, *triple.peers):
            answer = self._answers.get(name)
            if answer is None or "error" in answer:
                return f"{name}: " + ("no answer in time" if answer is None else str(answer["error"]))
        found = []
        directions: tuple[Direction, ...] = ("in", "out")
        for direction in directions:
            both = together(self._flows(triple, direction), settle_s(self._links, triple))
            if both is None:
                return f"the flows with {' and '.join(triple.peers)} were never under way together"
            rate = shared_rate(
                both,
                [_rate(self._links, *_way(triple.hub, p, direction)) for p in triple.peers],
                _fastest(self._links, triple.hub, direction),
            )
            if rate is not None:
                found.append(
                    LineProfile(
                        node=triple.hub,
                        direction=direction,
                        bandwidth_bytes_per_s=rate,
                        peers=triple.peers,
                    )
                )
        return found

    def _flows(self, triple: Triple, direction: Direction) -> list[Flow]:
        flows = []
        for peer in triple.peers:
            way = _way(triple.hub, peer, direction)
            arrivals = self._answers[way[1]]["arrivals"][way[0]]
            # A peer hears the go its link's latency after the hub.
            late_s = (self._links[way].latency_s or 0.0) if direction == "out" else 0.0
            flows.append(Flow([late_s + float(at) for at in arrivals], self._bytes(triple, *way)))
        return flows

    def _bytes(self, triple: Triple, source: str, target: str) -> int:
        return message_bytes(_rate(self._links, source, target), settle_s(self._links, triple))

    def _order(self, name: str, triple: Triple, more: dict[str, Any], others: Sequence[str]) -> None:
        member = self._members[name]
        member.phase = f"the line of {triple.hub}"
        pairs = [
            {
                "peer": other,
                "secret": self._secrets[triple.hub, other if name == triple.hub else name],
                "messages": MESSAGES,
                "send_bytes": self._bytes(triple, name, other),
                "receive_bytes": self._bytes(triple, other, name),
            }
            for other in others
        ]
        message = {"op": "line", "hub": triple.hub, "address": self._addresses[name], "pairs": pairs}
        self._fleet.send(member, message | self._limits | more)

    def _wait(self, names: Sequence[str]) -> None:
        members = [self._members[name] for name in names]
        self._fleet.wait(members, "line", self._limit_s, self._heard, fatal=False)
        self.silent |= {name for name in names if name not in self._answers}

    def _heard(self, member: Member, event: dict[str, Any]) -> None:
        name, hub = member.node.name, event.get("hub")
        triple = self._triples.get(str(hub))
        if triple is None or member is not self._members[name] or name not in (hub, *triple.peers):
            return  # not of this round
        if event.get("event") == "line":
            self._answers[name] = event
        elif event.get("event") == "line-listening":
            for peer, port in zip(triple.peers, event["ports"], strict=True):
                self._order(peer, triple, {"role": "peer", "host": event["address"], "port": port}, [name])
                self._asked.append(peer)


def _ways(triple: Triple) -> list[tuple[str, str]]:
    return [way for p in triple.peers for way in ((p, triple.hub), (triple.hub, p))]


def _way(hub: str, peer: str, direction: Direction) -> tuple[str, str]:
    return (peer, hub) if direction == "in" else (hub, peer)


def _rate(links: Rates, source: str, target: str) -> float:
    return links[source, target].bandwidth_bytes_per_s or 0.0


def _fastest(links: Rates, node: str, direction: Direction) -> float:
    end = 1 if direction == "in" else 0
    return max(_rate(links, *way) for way in links if way[end] == node and way[0] != way[1])
