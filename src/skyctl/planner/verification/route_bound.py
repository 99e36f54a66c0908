"""What no routes among some holders are faster than: cuts of their lines, and a certificate's prices.

Whatever prices of links and shared resources: every tree to a root and back uses, weighted by price, no less
than the cheapest does, and so do shares of trees; the busiest is used no less than the weighted mean.
So the cheapest tree's cost ÷ the sum of prices is a bound (weak duality); nothing is trusted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from skyctl.records.problem import Problem
from skyctl.records.sync import RoutePrices

Edge = tuple[str, str]


class Wires:
    """A problem's links and shared resources, in seconds a byte; what has no link is free."""

    def __init__(self, problem: Problem) -> None:
        self.link_s = {(x.source, x.target): 1 / x.bandwidth_bytes_per_s for x in problem.links}
        self.latency_s = {(x.source, x.target): x.latency_s for x in problem.links}
        self.shared_s = [1 / x.bandwidth_bytes_per_s for x in problem.shared]
        self.over: dict[Edge, list[int]] = {}
        for number, resource in enumerate(problem.shared):
            for source, target in {(pair[0], pair[1]) for pair in resource.links}:
                self.over.setdefault((source, target), []).append(number)

    def line_s(self, edge: Edge) -> float:
        """Seconds of a byte on the slowest of a link and what it shares."""
        return max(self.link_s.get(edge, 0.0), *(self.shared_s[k] for k in self.over.get(edge, ())), 0.0)

    def least_s(self, edges: Sequence[Edge]) -> float:
        """Seconds of a byte that is cut among all these edges: as fast as they are together, or less."""
        rate = [1 / s if (s := self.line_s(edge)) > 0 else math.inf for edge in edges]
        caps = [math.fsum(rate)]
        for number in {k for edge in edges for k in self.over.get(edge, ())}:
            apart = [r for r, edge in zip(rate, edges, strict=True) if number not in self.over.get(edge, ())]
            caps.append(1 / self.shared_s[number] + math.fsum(apart))
        return 1 / min(caps)

    def cut_s(self, devices: Sequence[str]) -> float:
        """Seconds of a byte for these holders at least, by what each of them can send and receive.

        Each sends and receives it once, and all together 2(n − 1) times.
        """
        least = 0.0
        for out in (True, False):
            each = [self.least_s([(d, x) if out else (x, d) for x in devices if x != d]) for d in devices]
            rates = math.fsum(1 / s if s > 0 else math.inf for s in each)
            least = max(least, *each, 2 * (len(devices) - 1) / rates)
        return least

    def least_latency_s(self, devices: Sequence[str]) -> float:
        """The shortest ways' latency from the farthest of these holders to a root, and to the farthest."""
        away = {(a, b): self.latency_s.get((a, b), 0.0) for a in devices for b in devices if a != b}
        away.update(((d, d), 0.0) for d in devices)
        for over in devices:
            for a in devices:
                for b in devices:
                    away[a, b] = min(away[a, b], away[a, over] + away[over, b])
        return min(
            max(away[d, root] for d in devices) + max(away[root, d] for d in devices) for root in devices
        )

    def priced_s(self, witness: RoutePrices) -> float:
        """Seconds of a byte at least for the witness's devices, by its prices; 0 where they price nothing."""
        devices = witness.devices
        prices = {(x.source, x.target): x.price for x in witness.links}
        shared = dict(enumerate(witness.shared[: len(self.shared_s)]))
        total = math.fsum([*prices.values(), *shared.values()])
        if not 0 < total < math.inf:
            return 0.0
        costs: dict[Edge, float] = {}
        for edge in ((a, b) for a in devices for b in devices if a != b):
            of_shared = (shared.get(k, 0.0) * self.shared_s[k] for k in self.over.get(edge, ()))
            costs[edge] = math.fsum([prices.get(edge, 0.0) * self.link_s.get(edge, 0.0), *of_shared])
        back = {(b, a): cost for (a, b), cost in costs.items()}
        return min(least_tree(costs, root) + least_tree(back, root) for root in devices) / total


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
