"""How fast trees are packed, and how near their bound: published topologies, and sites of many devices.

python benchmarks/routes.py [--seconds 60]
"""

from __future__ import annotations

import argparse
import itertools
import random
import time

from skyctl.planner.routes.route_choice import route_choices
from skyctl.planner.routes.route_network import Pair, RouteNetwork, Shared
from skyctl.planner.routes.tree_packing import pack_trees

DGX_1V = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2, (2, 6): 1,
    (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip
"""NVLinks between the eight V100 of a DGX-1V; a DGX-1P has one in the place of each one or two."""


def mesh(rates: dict[Pair, float], count: int) -> RouteNetwork:
    """Links both ways of these rates."""
    links = {pair: 1 / rate for (a, b), rate in rates.items() for pair in ((a, b), (b, a))}
    return RouteNetwork(count, tuple(range(count)), links)


def sites(count: int, size: int, seed: int) -> RouteNetwork:
    """Devices with lines of 20 to 200 in sites, links of 30 to 100 between sites, uplinks of 20 to 80."""
    draw = random.Random(seed)
    devices = range(count * size)
    pairs = list(itertools.permutations(devices, 2))
    links = {(a, b): 1 / (1000 if a // size == b // size else draw.choice([30, 60, 100])) for a, b in pairs}
    shared = []
    for end in (0, 1):
        for d in devices:
            own = tuple(pair for pair in pairs if pair[end] == d)
            shared.append(Shared(own, 1 / draw.choice([20, 50, 100, 200])))
        for site in range(count):
            crossing = tuple(p for p in pairs if p[end] // size == site != p[1 - end] // size)
            shared.append(Shared(crossing, 1 / draw.choice([20, 40, 80])))
    return RouteNetwork(len(devices), tuple(devices), links, shared)


def show(name: str, network: RouteNetwork, seconds: float, gap: float) -> None:
    """Packs and prints a line: the rate, the bound, the routes, the time."""
    began = time.perf_counter()
    packing = pack_trees(network, began + seconds, gap=gap)
    took_s = time.perf_counter() - began
    *_, few = route_choices(network, packing)
    rates = f"{1 / packing.byte_s:9.4f} of at most {1 / packing.bound_byte_s:9.4f}"
    print(
        f"{name:20} {rates}  gap {packing.gap:.2%}  {len(packing.routes)} routes → {len(few)}  {took_s:.2f} s"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for the largest, at most")
    seconds = parser.parse_args().seconds
    show("DGX-1V", mesh({pair: float(n) for pair, n in DGX_1V.items()}, 8), 5.0, 0.0)
    show("DGX-1P", mesh(dict.fromkeys(DGX_1V, 1.0), 8), 5.0, 0.0)
    for seed in range(3):
        show(f"32 in 4 sites ({seed})", sites(4, 8, seed), 5.0, 0.02)
    show("128 in 16 sites", sites(16, 8, 0), seconds, 0.02)


if __name__ == "__main__":
    main()
