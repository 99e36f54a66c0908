"""Capacity that links share: one node's line to its network, and one site's uplink to all others.

Pairwise rates don't tell it. A stage in the middle of a pipeline gets activations from one neighbour and
gradients from the other over one network card; and all links that leave a site may cross one path. So several
flows are run at the same time, and what they get together is held against what each gets alone.

* A node's line: every node with two peers or more is once the hub of a triple, with flows in both directions
  to both peers, as in training. Triples without a node in common run in the same round. One short window is
  no evidence where it comes near to what the links say: those flows run again, for longer.
* A site's uplink: two flows at once, each between another node of the site and another one outside, where
  possible at two different other sites; one direction at a time. If they get clearly less together than the
  links say, both are measured alone the same way, and together once more. If only two sites exist, the one
  path between them is named once, after the first of them that has two nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from skyctl.probe.concurrent_flows import (
    Answers,
    FlowEnds,
    FlowPlayer,
    FlowSizes,
    HubRequest,
    ReceivedFlow,
    arrivals_of,
    joint_rate,
)
from skyctl.probe.device_probes import DeviceProbes
from skyctl.records.profile import LineProfile, LinkProfile, SiteProfile, UplinkProfile

Direction = Literal["in", "out"]
LinkTable = Mapping[FlowEnds, LinkProfile]
"""The links that have figures, by (source, target)."""
OnRound = Callable[[int, int], None]
"""Called with rounds done, and rounds in all."""

SHARED_BELOW = 0.85
"""A line is shared where two flows together get less than this part of what they get one at a time."""
DOUBTED_ABOVE = 0.6
"""Two flows that get more than this part of it, and less than the above, may have been unlucky."""
BUSY_ABOVE = 0.8
"""Flows that take more than this part of a node's processors are limited by these, and show no line."""
AS_FAST = 0.8
"""A peer this near to the second fastest serves as well: the two together still ask for more than a line."""
MOST_ROUNDS = 16
UPLINK_FLOWS = 2
CONNECT_S = 10.0


NODE_SIZES = FlowSizes(
    measure_s=0.3,
    settle_s=0.1,
    most_settle_s=0.4,
    settle_latencies=10,
    messages=16,
    most_bytes=32 << 20,
    transfer_s=10.0,
)
UPLINK_SIZES = FlowSizes(
    measure_s=0.8,
    settle_s=0.15,
    most_settle_s=0.8,
    settle_latencies=16,
    messages=48,
    most_bytes=128 << 20,
    transfer_s=15.0,
)


def shared_rate(both: float, singles: Sequence[float], fastest: float) -> float | None:
    """The rate that a line carries, all in bytes per second; None if it is not seen to be shared.

    Args:
        both: what two flows got together.
        singles: what each gets alone.
        fastest: the fastest of all flows over that line alone: it is no slower.
    """
    rate = max(both, fastest)
    return rate if rate < SHARED_BELOW * sum(singles) else None


# One node's line


@dataclass(frozen=True)
class HubTriple:
    """A hub and the two peers that it talks with."""

    hub: str
    peers: tuple[str, str]


def hub_candidates(links: LinkTable, names: Sequence[str]) -> dict[str, list[str]]:
    """By node, the peers that can show its line, best first; none for a node with fewer than two.

    A peer counts by the direction in which it falls further behind the node's second fastest peer.
    """
    candidates: dict[str, list[str]] = {}
    for hub in names:
        peers = [p for p in names if p != hub and (p, hub) in links and (hub, p) in links]
        if len(peers) < 2:
            continue
        second_in = sorted((_rate(links, (p, hub)) for p in peers), reverse=True)[1]
        second_out = sorted((_rate(links, (hub, p)) for p in peers), reverse=True)[1]
        scores = {
            p: min(_rate(links, (p, hub)) / second_in, _rate(links, (hub, p)) / second_out) for p in peers
        }
        ranked = sorted(peers, key=lambda p: -scores[p])
        enough = AS_FAST * scores[ranked[1]]
        candidates[hub] = [p for p in ranked if scores[p] >= enough]
    return candidates


def hub_rounds(
    wanted: Mapping[str, Sequence[str]], most: int = MOST_ROUNDS
) -> tuple[list[list[HubTriple]], list[str]]:
    """Every hub once, with two of its candidates; triples of a round have no node in common.

    Returns:
        The rounds, and the hubs that ``most`` rounds have no room for.
    """
    pending = sorted(wanted, key=lambda hub: len(wanted[hub]))
    rounds: list[list[HubTriple]] = []
    while pending and len(rounds) < most:
        taken: set[str] = set()
        triples: list[HubTriple] = []
        for hub in pending:
            peers = [p for p in wanted[hub] if p not in taken]
            if hub in taken or len(peers) < 2:
                continue
            triples.append(HubTriple(hub, (peers[0], peers[1])))
            taken |= {hub, peers[0], peers[1]}
        rounds.append(triples)
        served = {triple.hub for triple in triples}
        pending = [hub for hub in pending if hub not in served]
    return rounds, pending


def measure_node_lines(
    probes: DeviceProbes,
    addresses: Mapping[str, str],
    links: Sequence[LinkProfile],
    on_round: OnRound = lambda _done, _of: None,
    *,
    connect_s: float = CONNECT_S,
    transfer_s: float = NODE_SIZES.transfer_s,
) -> tuple[list[LineProfile], dict[str, str]]:
    """Every node's line that is shared, in the order of the nodes, "in" before "out".

    Args:
        links: what each pair carries alone.

    Returns:
        The lines, and by node why its line could not be measured. That fails no node.
    """
    table = {(k.source, k.target): k for k in links if k.latency_s is not None and k.bandwidth_bytes_per_s}
    limit_s = 2 * connect_s + 3 * transfer_s
    survey = _NodeLines(table)
    player = FlowPlayer(probes, addresses, NODE_SIZES, connect_s, transfer_s, limit_s)
    rounds, late = hub_rounds(hub_candidates(table, list(player.members)))
    reasons = dict.fromkeys(late, f"{MOST_ROUNDS} rounds have no room for it: too few fast peers for all")
    for number, triples in enumerate(rounds):
        on_round(number, len(rounds))
        reasons |= survey.play(player, triples)
    again, _ = hub_rounds({triple.hub: triple.peers for triple in survey.doubted()})
    longer = FlowPlayer(probes, addresses, UPLINK_SIZES, connect_s, transfer_s, limit_s)
    for number, triples in enumerate(again, len(rounds)):
        on_round(number, len(rounds) + len(again))
        reasons |= survey.play(longer, triples)
    lines = survey.lines()
    return [line for name in player.members for line in lines.get(name, [])], reasons


class _NodeLines:
    """The rates that each triple's flows got together, the best of all times that they ran."""

    def __init__(self, links: LinkTable) -> None:
        self._links = links
        self._rates: dict[HubTriple, dict[Direction, float]] = {}
        """By triple and direction, what both flows got together, in bytes per second."""

    def play(self, player: FlowPlayer, triples: Sequence[HubTriple]) -> dict[str, str]:
        """One round. By hub, why its triple tells nothing, in words."""
        able = [t for t in triples if player.missing((t.hub, *t.peers)) is None]
        reasons = {t.hub: "one of the three nodes answers no more" for t in triples if t not in able}
        answers = player.play([self._order(player.sizes, triple) for triple in able])
        for triple in able:
            rates = self._joint_rates(player, triple, answers)
            if isinstance(rates, str):
                reasons[triple.hub] = rates
                continue
            best = self._rates.setdefault(triple, rates)
            self._rates[triple] = {way: max(rate, best[way]) for way, rate in rates.items()}
        return reasons

    def doubted(self) -> list[HubTriple]:
        """The triples whose flows came near to what they get one at a time, and still below."""
        return [
            triple
            for triple, rates in self._rates.items()
            if any(DOUBTED_ABOVE <= rates[way] / self._alone(triple, way) < SHARED_BELOW for way in rates)
        ]

    def lines(self) -> dict[str, list[LineProfile]]:
        """By hub, its lines that are shared."""
        lines: dict[str, list[LineProfile]] = {}
        for triple, rates in self._rates.items():
            for way, both in rates.items():
                end = 1 if way == "in" else 0
                fastest = max(
                    _rate(self._links, k) for k in self._links if k[end] == triple.hub and k[0] != k[1]
                )
                singles = [_rate(self._links, ends) for ends in _flow_ends(triple, way)]
                rate = shared_rate(both, singles, fastest)
                if rate is not None:
                    line = LineProfile(
                        node=triple.hub, direction=way, bandwidth_bytes_per_s=rate, peers=triple.peers
                    )
                    lines.setdefault(triple.hub, []).append(line)
        return lines

    def _alone(self, triple: HubTriple, way: Direction) -> float:
        return sum(_rate(self._links, ends) for ends in _flow_ends(triple, way))

    def _order(self, sizes: FlowSizes, triple: HubTriple) -> HubRequest:
        settle_s = triple_settle_s(self._links, triple, sizes)

        def message_bytes(source: str, target: str) -> int:
            return sizes.message_bytes(_rate(self._links, (source, target)), settle_s)

        both = {p: (message_bytes(triple.hub, p), message_bytes(p, triple.hub)) for p in triple.peers}
        return HubRequest(triple.hub, both, f"the line of {triple.hub}")

    def _joint_rates(
        self, player: FlowPlayer, triple: HubTriple, answers: Answers
    ) -> dict[Direction, float] | str:
        """The rate that each direction's flows got together (bytes per second), or why it is not known."""
        names = (triple.hub, *triple.peers)
        arrivals = arrivals_of(answers, names)
        if isinstance(arrivals, str):
            return arrivals
        busiest = max(names, key=lambda name: player.busy_shares.get(name, 0.0))
        if (share := player.busy_shares.get(busiest, 0.0)) > BUSY_ABOVE:
            return f"the flows took {share:.0%} of the processors of {busiest}"
        order, settle_s = (
            self._order(player.sizes, triple),
            triple_settle_s(self._links, triple, player.sizes),
        )
        rates: dict[Direction, float] = {}
        directions: tuple[Direction, ...] = ("in", "out")
        for way in directions:
            flows = []
            for peer, (source, target) in zip(triple.peers, _flow_ends(triple, way), strict=True):
                # A peer hears the go its link's latency after the hub.
                late_s = (self._links[source, target].latency_s or 0.0) if way == "out" else 0.0
                size = order.message_bytes[peer][way == "in"]
                flows.append(ReceivedFlow([late_s + float(at) for at in arrivals[target][source]], size))
            both = joint_rate(flows, settle_s)
            if both is None:
                return f"the flows with {' and '.join(triple.peers)} were never under way together"
            rates[way] = both
        return rates


def triple_settle_s(links: LinkTable, triple: HubTriple, sizes: FlowSizes = NODE_SIZES) -> float:
    """The seconds that are left out at the start of a triple's flows."""
    ends = [ends for p in triple.peers for ends in ((p, triple.hub), (triple.hub, p))]
    return sizes.settle_for(max(links[way].latency_s or 0.0 for way in ends))


def _flow_ends(triple: HubTriple, way: Direction) -> list[FlowEnds]:
    return [(peer, triple.hub) if way == "in" else (triple.hub, peer) for peer in triple.peers]


def _rate(links: LinkTable, ends: FlowEnds) -> float:
    return links[ends].bandwidth_bytes_per_s or 0.0


# One site's uplink


@dataclass(frozen=True)
class UplinkTrial:
    """One site's direction, and the flows that show it; no node is in two of them."""

    site: str
    direction: Direction
    flows: tuple[FlowEnds, ...]


def uplink_trials(sites: Sequence[SiteProfile], links: LinkTable) -> list[UplinkTrial]:
    """For every site with two nodes and two nodes outside, both directions.

    The flows are those that ask for most, those with different other sites before a second with the same.
    """
    trials: list[UplinkTrial] = []
    able = [site for site in sites if len(site.nodes) > 1]
    for site in able[:1] if len(sites) == 2 else able:
        directions: tuple[Direction, ...] = ("out", "in")
        for direction in directions:
            chosen = _choose_flows(site, sites, links, direction)
            if len(chosen) == UPLINK_FLOWS:
                trials.append(UplinkTrial(site.name, direction, tuple(chosen)))
    return trials


def _choose_flows(
    site: SiteProfile, sites: Sequence[SiteProfile], links: LinkTable, direction: Direction
) -> list[FlowEnds]:
    site_of = {name: other.name for other in sites for name in other.nodes}
    outside = [name for name in site_of if site_of[name] != site.name]
    pairs = [(mine, other) for mine in site.nodes for other in outside]
    flows = pairs if direction == "out" else [(other, mine) for mine, other in pairs]
    flows = sorted((ends for ends in flows if ends in links), key=lambda ends: -_rate(links, ends))
    end = 1 if direction == "out" else 0
    chosen: list[FlowEnds] = []
    for apart in (True, False):
        for flow in flows:
            busy = {name for taken in chosen for name in taken}
            used = {site_of[taken[end]] for taken in chosen} if apart else set()
            if len(chosen) < UPLINK_FLOWS and not busy & set(flow) and site_of[flow[end]] not in used:
                chosen.append(flow)
    return chosen


def measure_uplinks(
    probes: DeviceProbes,
    addresses: Mapping[str, str],
    links: Sequence[LinkProfile],
    sites: Sequence[SiteProfile],
    on_round: OnRound = lambda _done, _of: None,
    *,
    connect_s: float = CONNECT_S,
    transfer_s: float = UPLINK_SIZES.transfer_s,
) -> tuple[list[UplinkProfile], dict[str, str]]:
    """The uplinks that are shared, in the order of the sites.

    Args:
        links: what each pair carries alone, filled in ones among them.

    Returns:
        The uplinks, and by site why its uplink could not be measured. That fails no node.
    """
    player = FlowPlayer(probes, addresses, UPLINK_SIZES, connect_s, transfer_s, 2 * connect_s + transfer_s)
    table = {
        (link.source, link.target): link
        for link in links
        if link.latency_s is not None
        and link.bandwidth_bytes_per_s is not None
        and {link.source, link.target} <= set(player.members)
    }
    trials = uplink_trials(sites, table)
    uplinks: list[UplinkProfile] = []
    reasons: dict[str, str] = {}
    for number, trial in enumerate(trials):
        on_round(number, len(trials))
        outcome = _measure_uplink(player, table, trial)
        if isinstance(outcome, str):
            reasons[trial.site] = outcome
        elif outcome is not None:
            uplinks.append(outcome)
    return uplinks, reasons


def _measure_uplink(player: FlowPlayer, links: LinkTable, trial: UplinkTrial) -> UplinkProfile | str | None:
    """The uplink that links share in that direction, None if they share none, or why that is not known."""
    both = _flows_rate(player, links, trial.flows)
    if isinstance(both, str):
        return both
    if shared_rate(both, [_rate(links, ends) for ends in trial.flows], 0.0) is None:
        return None
    rates: list[float] = []
    for flows in (*((ends,) for ends in trial.flows), trial.flows):
        rate = _flows_rate(player, links, flows)
        if isinstance(rate, str):
            return rate
        rates.append(rate)
    *singles, again = rates
    shared = shared_rate(max(both, again), singles, max(singles))
    if shared is None:
        return None
    return UplinkProfile(
        site=trial.site, direction=trial.direction, bandwidth_bytes_per_s=shared, pairs=trial.flows
    )


def _flows_rate(player: FlowPlayer, links: LinkTable, flows: Sequence[FlowEnds]) -> float | str:
    """Bytes per second of all the flows while all ran, or why there is no such figure."""
    names = [name for ends in flows for name in ends]
    gone = player.missing(names)
    if gone is not None:
        return f"node {gone} answers no more"
    settle_s = player.sizes.settle_for(max(links[ends].latency_s or 0.0 for ends in flows))
    sizes = {ends: player.sizes.message_bytes(_rate(links, ends), settle_s) for ends in flows}
    orders = [HubRequest(a, {b: (sizes[a, b], 1)}, f"the uplink between {a} and {b}") for a, b in flows]
    arrivals = arrivals_of(player.play(orders, hold=True), names)
    if isinstance(arrivals, str):
        return arrivals
    received = [ReceivedFlow([float(at) for at in arrivals[b][a]], sizes[a, b]) for a, b in flows]
    rate = joint_rate(received, settle_s)
    return "the flows were never under way together" if rate is None else rate
