"""The most layers that balanced edges can hold, bounded from above by prices of the nodes: for any number of
devices, and nearly always as exact as ``balance.py``.

A potential u per node makes an edge worth length + u[source] − u[target]; what balances is worth its length,
whatever u. So with each device at its best edge the sum is an upper bound on all lengths: below L it refutes
the limit. The best potentials are the linear relaxation's; in layers' terms they are prices that repeat.
"""

from __future__ import annotations

import numpy as np

from skyctl.planner.bottleneck.reach import Ints
from skyctl.planner.bottleneck.repeats import NONE, Edges
from skyctl.planner.solver import Cuts

MAX_CUTS = 150
ROUNDING = 1e-6
"""In layers."""


def most_layers(edges: Edges, lengths: Ints, sizes: Ints) -> float:
    """An upper bound on the layers that one edge a device can hold; lengths: [class, edge].

    The least one that potentials give, but no more effort than tells whether it is below all layers.
    """
    nodes = edges.run.period + len(edges.places)
    effect = np.zeros((len(edges.edges) + 1, nodes))  # the last: no edge
    for e, edge in enumerate(edges.edges):
        effect[e, edge.source] += 1
        effect[e, edge.target] -= 1
    ends = np.zeros(nodes)
    ends[edges.source], ends[edges.sink] = -1, 1
    values = np.hstack((np.where(lengths > 0, lengths, NONE), np.zeros((len(lengths), 1), dtype=np.int64)))
    cuts = Cuts(nodes - 1, float(max(2, lengths.max())))  # potentials count against node 0's
    best = np.inf
    point = np.zeros(nodes)
    for _ in range(MAX_CUTS):
        value = values + effect @ point
        chosen = np.argmax(value, axis=1)
        most = float(value[np.arange(len(value)), chosen] @ sizes + ends @ point)
        best = min(best, most)
        if best < edges.model.layers - 2 * ROUNDING:
            break
        slope = sizes @ effect[chosen] + ends
        cuts.add(most - float(slope @ point), slope[1:])
        least = cuts.least()
        if least is None or least[0] >= min(best, edges.model.layers) - ROUNDING:
            break
        point = np.concatenate(([0.0], least[1]))
    return best
