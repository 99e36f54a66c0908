"""Bounds that no routes among some replicas are below: cuts of their lines, and a certificate's prices.

Routes may go over helpers as well. Let links, shared resources and helpers' processors have any prices. Every
tree to a root and back uses, weighted by price, no less than the cheapest does, and so do shares of trees.
The busiest has no less use than the weighted mean. So the cheapest tree's cost ÷ the sum of prices is a
bound (weak duality); nothing is trusted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, combinations

from skyctl.planner.verification.routes import Edge
from skyctl.planner.verification.summed_bytes import FormatBytes
from skyctl.records.problem import Problem
from skyctl.records.sync import RoutePrices

MOST_HELPERS = 4
"""Of devices that may help the same replicas over trees, those with the fattest lines count."""


class Wires:
    """A problem's links and shared resources, in seconds a byte; what has no link is free."""

    def __init__(self, problem: Problem) -> None:
        self.link_s = {(x.source, x.target): 1 / x.bandwidth_bytes_per_s for x in problem.links}
        passes = FormatBytes(problem).passes
        self.latency_s = {(x.source, x.target): passes * x.latency_s for x in problem.links}
        self.shared_s = [1 / x.bandwidth_bytes_per_s for x in problem.shared]
        self.over: dict[Edge, list[int]] = {}
        for number, resource in enumerate(problem.shared):
            for source, target in {(pair[0], pair[1]) for pair in resource.links}:
                self.over.setdefault((source, target), []).append(number)
        self.message_s = {x.id: x.message_byte_s for x in problem.devices}
        self.add_s = {x.id: x.reduce_byte_s for x in problem.devices}
        self.sync = problem.sync
        self.may_help = self._ranked(problem)

    def _ranked(self, problem: Problem) -> list[str]:
        """The devices that may be helpers, those with the fattest lines before others."""
        ids = [device.id for device in problem.devices]
        if problem.parallel != "data" or problem.sync in ("ring", "star"):
            return []
        slow: dict[str, float] = {}
        for device in ids if problem.helpers is None else dict.fromkeys(problem.helpers):
            others = [x for x in ids if x != device]
            out, back = [(device, x) for x in others], [(x, device) for x in others]
            slow[device] = max(self.least_s(out), self.least_s(back))
        return sorted((x for x in ids if x in slow), key=slow.__getitem__)

    def helpers(self, devices: Sequence[str]) -> list[str]:
        """Those over which routes among these replicas may go."""
        others = [x for x in self.may_help if x not in devices]
        return others if self.sync == "server" else others[:MOST_HELPERS]

    def line_s(self, edge: Edge) -> float:
        """Seconds of a byte on the slowest of a link and what it shares."""
        return max(self.link_s.get(edge, 0.0), *(self.shared_s[k] for k in self.over.get(edge, ())), 0.0)

    def least_s(self, edges: Sequence[Edge]) -> float:
        """Seconds of a byte that is cut among all these edges: as fast as they are together, or less.

        Without edges there is nowhere that it has to go.
        """
        if not edges:
            return 0.0
        rate = [1 / s if (s := self.line_s(edge)) > 0 else math.inf for edge in edges]
        caps = [math.fsum(rate)]
        for number in {k for edge in edges for k in self.over.get(edge, ())}:
            apart = [r for r, edge in zip(rate, edges, strict=True) if number not in self.over.get(edge, ())]
            caps.append(1 / self.shared_s[number] + math.fsum(apart))
        return 1 / min(caps)

    def cut_s(self, devices: Sequence[str]) -> float:
        """Seconds of a byte for these replicas at least, by what each of them can send and receive.

        Each sends and receives it once, and all together, helpers as well, 2(n − 1) times.
        """
        least = 0.0
        there = [*devices, *self.helpers(devices)]
        for out in (True, False):
            each = [self.least_s([(d, x) if out else (x, d) for x in there if x != d]) for d in there]
            rates = math.fsum(1 / s if s > 0 else math.inf for s in each)
            least = max(least, *each[: len(devices)], 2 * (len(devices) - 1) / rates)
        return least

    def least_latency_s(self, devices: Sequence[str]) -> float:
        """The shortest ways' latency from the farthest of these replicas to a root, and to the farthest."""
        there = [*devices, *self.helpers(devices)]
        away = {(a, b): self.latency_s.get((a, b), 0.0) for a in there for b in there if a != b}
        away.update(((d, d), 0.0) for d in there)
        for over in there:
            for a in there:
                for b in there:
                    away[a, b] = min(away[a, b], away[a, over] + away[over, b])
        return min(
            max(away[d, root] for d in devices) + max(away[root, d] for d in devices) for root in there
        )

    def priced_s(self, witness: RoutePrices) -> float:
        """Seconds of a byte at least for the witness's devices, by its prices; 0 where they price nothing."""
        devices, helpers = witness.devices, self.helpers(witness.devices)
        prices = {(x.source, x.target): x.price for x in witness.links}
        shared = dict(enumerate(witness.shared[: len(self.shared_s)]))
        busy = {x.device: x.price for x in witness.processors}
        total = math.fsum([*prices.values(), *shared.values(), *busy.values()])
        if not 0 < total < math.inf or not set(busy) <= set(helpers):
            return 0.0
        there = [*devices, *helpers]
        down: dict[Edge, float] = {}
        up: dict[Edge, float] = {}  # turned around: from the root
        for edge in ((a, b) for a in there for b in there if a != b):
            of_shared = (shared.get(k, 0.0) * self.shared_s[k] for k in self.over.get(edge, ()))
            of_ends = (busy.get(end, 0.0) * self.message_s[end] for end in edge)
            of_link = prices.get(edge, 0.0) * self.link_s.get(edge, 0.0)
            down[edge] = math.fsum([of_link, *of_shared, *of_ends])
            up[edge[1], edge[0]] = down[edge] + busy.get(edge[1], 0.0) * self.add_s[edge[1]]
        return min(least_reach(up, x, devices) + least_reach(down, x, devices) for x in there) / total


def least_reach(costs: Mapping[Edge, float], root: str, wanted: Sequence[str]) -> float:
    """The least cost of edges over which the root reaches all that are wanted, over any of the others."""
    more = sorted({end for edge in costs for end in edge} - {*wanted, root})
    totals = []
    for over in chain.from_iterable(combinations(more, size) for size in range(len(more) + 1)):
        nodes = {*wanted, root, *over}
        totals.append(least_tree({e: cost for e, cost in costs.items() if nodes.issuperset(e)}, root))
    return min(totals)


def least_tree(costs: Mapping[Edge, float], root: str) -> float:
    """The least cost of edges (from, to) over which the root reaches every end; infinite: it can't.

    Each node takes its cheapest entering edge; nodes on a cycle of these become one, until there is none.
    """
    names = {name: i for i, name in enumerate(sorted({end for edge in costs for end in edge}))}
    count, at_root = len(names), names[root]
    edges = [(names[a], names[b], cost) for (a, b), cost in costs.items()]
    total = 0.0
    while True:
        cheapest: dict[int, tuple[float, int]] = {}
        for source, target, cost in edges:
            if target != at_root and cost < cheapest.get(target, (math.inf, -1))[0]:
                cheapest[target] = (cost, source)
        if len(cheapest) < count - 1:
            return math.inf
        total += math.fsum(cost for cost, _ in cheapest.values())
        merged = _merged({target: source for target, (_, source) in cheapest.items()}, at_root)
        if len(set(merged.values())) == count:
            return total
        left: dict[tuple[int, int], float] = {}
        for source, target, cost in edges:
            pair = (merged[source], merged[target])
            if pair[0] != pair[1] and target != at_root:
                reduced = cost - cheapest[target][0]
                left[pair] = min(reduced, left.get(pair, math.inf))
        edges = [(source, target, cost) for (source, target), cost in left.items()]
        count, at_root = len(set(merged.values())), merged[at_root]


def _merged(sources: Mapping[int, int], root: int) -> dict[int, int]:
    """By node, itself, or the least node of the cycle that it is on when each comes from its source."""
    merged = {root: root}
    for start in sources:
        way: list[int] = []
        at = start
        while at not in merged and at not in way:
            way.append(at)
            at = sources[at]
        cycle = way[way.index(at) :] if at in way else []
        merged.update((node, node) for node in way)
        merged.update((node, min(cycle)) for node in cycle)
    return merged
