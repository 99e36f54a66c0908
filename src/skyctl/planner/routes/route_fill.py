"""A sum's seconds beyond its bytes on the busiest link: messages pass a tree's edges one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from skyctl.planner.routes.route_layouts import DeviceRoute, Pair
from skyctl.planner.sum_costs import SumCosts
from skyctl.records.problem import Device

Resource = Pair | int
"""A link (from a device to itself: its processor), or a shared resource's number."""


def fill_s(
    costs: SumCosts,
    routes: Sequence[DeviceRoute],
    replicas: Sequence[int],
    size_bytes: float,
    chunk_bytes: float,
) -> float:
    """Seconds beyond those of all bytes on what is busiest: a link, a shared resource, a helper's processor.

    0 for a ring and for a star. ``size_bytes``: of the gradients; ``chunk_bytes``: of a message, at most.

    A link has nothing to do until a first message has come to it over the edges before it, and what it has
    sent last goes on over the edges after it. It begins with the route that comes to it soonest, and ends
    with the one that ends soonest after it. A route's first edge and last edge count with no message.
    """
    loads_s: dict[Resource, float] = {}
    head_s: dict[Resource, float] = {}
    tail_s: dict[Resource, float] = {}
    for route in routes:
        message_bytes = min(chunk_bytes, route.share * size_bytes)

        def message_s(pair: Pair, message_bytes: float = message_bytes) -> float:
            return message_bytes * costs.line_byte_s(*pair)

        for edge in _edges(route, message_s):
            used: list[tuple[Resource, float]] = [(edge.pair, costs.byte_s.get(edge.pair, 0.0))]
            used += costs.shared.get(edge.pair, ())
            used += [
                ((d, d), processor_s(costs.problem.devices[d], adds=edge.adds and d == edge.pair[1]))
                for d in edge.pair
                if d not in replicas
            ]
            for resource, byte_s in used:
                loads_s[resource] = loads_s.get(resource, 0.0) + route.share * byte_s * size_bytes
                head_s[resource] = min(edge.before_s, head_s.get(resource, edge.before_s))
                tail_s[resource] = min(edge.after_s, tail_s.get(resource, edge.after_s))
    if not loads_s:
        return 0.0
    beyond_s = max(load + head_s[x] + tail_s[x] for x, load in loads_s.items()) - max(loads_s.values())
    return costs.passes * beyond_s


def processor_s(device: Device, *, adds: bool) -> float:
    """Processor seconds of a byte that the device sends or receives, and adds to its own."""
    return device.message_byte_s + (device.reduce_byte_s if adds else 0.0)


class _Edge(NamedTuple):
    """A link of a route, and the seconds of one message on the longest ways before and after it.

    ``adds``: its target adds what comes over it.
    """

    pair: Pair
    adds: bool
    before_s: float
    after_s: float


def _edges(route: DeviceRoute, message_s: Callable[[Pair], float]) -> Iterator[_Edge]:
    """Every edge of a route, up and down."""
    up = _Way(route.root, [(parent, child) for child, parent in route.up], lambda p, c: message_s((c, p)))
    down = _Way(route.root, route.down, lambda p, c: message_s((p, c)))
    for child, parent in route.up:
        yield _Edge(
            (child, parent), True, up.beyond_s[child], up.from_root_s[parent] + down.beyond_s[route.root]
        )
    for parent, child in route.down:
        yield _Edge(
            (parent, child), False, up.beyond_s[route.root] + down.from_root_s[parent], down.beyond_s[child]
        )


class _Way:
    """One direction of a route.

    Attributes:
        from_root_s: by device, of one message on all edges between the root and it.
        beyond_s: by device, the same of the longest way beyond it, but for the edge at its end.
    """

    def __init__(self, root: int, edges: Sequence[Pair], edge_s: Callable[[int, int], float]) -> None:
        children: dict[int, list[int]] = {}
        for parent, child in edges:
            children.setdefault(parent, []).append(child)
        self.from_root_s: dict[int, float] = {root: 0.0}
        order = [root]
        for parent in order:
            for child in children.get(parent, ()):
                self.from_root_s[child] = self.from_root_s[parent] + edge_s(parent, child)
                order.append(child)
        self.beyond_s: Mapping[int, float] = (beyond_s := dict.fromkeys(order, 0.0))
        for parent in reversed(order):
            for child in children.get(parent, ()):
                if child in children:
                    beyond_s[parent] = max(beyond_s[parent], edge_s(parent, child) + beyond_s[child])
