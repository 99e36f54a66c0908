"""Networks for tests of routes, and what no search may beat: all trees as columns of a linear program."""

from __future__ import annotations

import itertools
import random

from ortools.linear_solver import pywraplp

from skyctl.planner.routes.route_network import RouteNetwork, Shared

DGX_1V = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2, (2, 6): 1,
    (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip
"""NVLinks between the eight V100 of a DGX-1V."""
DGX_1P = dict.fromkeys(DGX_1V, 1)
LAB_MESH = {(0, 1): 40, (1, 2): 40, (2, 3): 40, (0, 3): 5, (0, 2): 20, (1, 3): 20}


def mesh(count, rates, chosen=None):
    """Links both ways of these rates, between those of the devices that are chosen, numbered anew."""
    place = {d: i for i, d in enumerate(chosen if chosen is not None else range(count))}
    links = {}
    for (a, b), rate in rates.items():
        if a in place and b in place:
            links[place[a], place[b]] = links[place[b], place[a]] = 1 / rate
    return RouteNetwork(len(place), tuple(range(len(place))), links)


def lines(rates, replicas=None):
    """Devices with a line each, of the same rate in and out, and nothing else between them."""
    n = len(rates)
    shared = []
    for d, rate in enumerate(rates):
        others = [x for x in range(n) if x != d]
        shared.append(Shared(tuple((d, x) for x in others), 1 / rate))
        shared.append(Shared(tuple((x, d) for x in others), 1 / rate))
    free = dict.fromkeys(itertools.permutations(range(n), 2), 0.0)
    return RouteNetwork(n, tuple(range(n if replicas is None else replicas)), free, shared)


def sites(count, size, seed):
    """Devices in sites: fast links and lines of 20 to 200 within, 30 to 100 between, uplinks of 20 to 80."""
    r = random.Random(seed)
    n = count * size
    links = {
        (a, b): 1 / (1000 if a // size == b // size else r.choice([30, 60, 100]))
        for a, b in itertools.permutations(range(n), 2)
    }
    shared = list(lines([r.choice([20, 50, 100, 200]) for _ in range(n)]).shared)
    for site in range(count):
        rate = r.choice([20, 40, 80])
        for end in (0, 1):
            crossing = (p for p in links if p[end] // size == site != p[1 - end] // size)
            shared.append(Shared(tuple(crossing), 1 / rate))
    return RouteNetwork(n, tuple(range(n)), links, shared)


def random_network(seed, helpers=0):
    """3 to 7 devices on sparse links that differ by direction; shared resources and processors on some.

    The last ``helpers`` of them hold nothing.
    """
    r = random.Random(seed)
    n = r.randint(3, 7)
    around = r.sample(range(n), n)
    pairs = set(zip(around, around[1:] + around[:1], strict=True))
    spare = [p for p in itertools.permutations(range(n), 2) if p not in pairs]
    pairs |= set(r.sample(spare, min(len(spare), r.randint(1, 6))))
    links = {pair: r.choice([0.0, *[1 / r.uniform(1, 40)] * 9]) for pair in sorted(pairs)}
    shared = [
        Shared(tuple(r.sample(sorted(pairs), r.randint(1, 4))), 1 / r.uniform(1, 40))
        for _ in range(r.choice([0, 0, 1, 2]))
    ]
    busy = r.random() < 0.4
    return RouteNetwork(
        n,
        tuple(range(n - helpers)),
        links,
        shared,
        [r.uniform(0, 0.1) for _ in range(n)] if busy else (),
        [r.uniform(0, 0.05) for _ in range(n)] if busy else (),
    )


def least_byte_s(network):
    """Seconds a byte by brute force: every tree up and every tree down of every root is a column."""
    lp = pywraplp.Solver.CreateSolver("GLOP")
    most = lp.NumVar(0, lp.infinity(), "")
    lp.Minimize(most)
    loads = {}
    whole = lp.Constraint(1, 1)
    for root in range(network.count):
        halves = lp.Constraint(0, 0)
        for up in (True, False):
            for tree in all_trees(network, root, up):
                share = lp.NumVar(0, lp.infinity(), "")
                halves.SetCoefficient(share, 1 if up else -1)
                if up:
                    whole.SetCoefficient(share, 1)
                used = {}
                for source, target in tree:
                    for what, seconds in uses(network, source, target, up):
                        used[what] = used.get(what, 0) + seconds
                for what, seconds in used.items():
                    if what not in loads:
                        loads[what] = lp.Constraint(-lp.infinity(), 0)
                        loads[what].SetCoefficient(most, -1)
                    loads[what].SetCoefficient(share, seconds)
    assert lp.Solve() == lp.OPTIMAL
    return most.solution_value()


def all_trees(network, root, up):
    """Every tree to the root (``up``) or from it over all replicas, as edges in which they send."""
    helpers = [d for d in network.helpers if d != root]
    for some in (s for size in range(len(helpers) + 1) for s in itertools.combinations(helpers, size)):
        yield from trees_over([*{*network.replicas, root}, *some], network, root, up)


def trees_over(there, network, root, up):
    others = [d for d in there if d != root]
    ends = [[(d, x) if up else (x, d) for x in there] for d in others]
    for edges in itertools.product(*([e for e in each if e in network.link_byte_s] for each in ends)):
        parents = {e[0] if up else e[1]: e[1] if up else e[0] for e in edges}
        if all(reaches(parents, d, root) for d in others):
            yield edges


def reaches(parents, device, root):
    for _ in parents:
        device = parents[device]
        if device == root:
            return True
    return False


def uses(network, source, target, up):
    yield (source, target), network.link_byte_s[source, target]
    for number, resource in enumerate(network.shared):
        if (source, target) in resource.links:
            yield number, resource.byte_s
    if network.message_byte_s:
        yield f"p{source}", network.message_byte_s[source]
        yield f"p{target}", network.message_byte_s[target] + (network.add_byte_s[target] if up else 0)


def strength(count, rates):
    """Of an undirected graph: over all partitions, the least rate between the parts ÷ (parts − 1)."""
    best = float("inf")
    for of in partitions(count):
        parts = max(of) + 1
        if parts > 1:
            cut = sum(rate for (a, b), rate in rates.items() if of[a] != of[b])
            best = min(best, cut / (parts - 1))
    return best


def partitions(count):
    """By element its part, numbered as they come."""
    parts = [(0,)]
    for _ in range(count - 1):
        parts = [(*of, part) for of in parts for part in range(max(of) + 2)]
    return parts
