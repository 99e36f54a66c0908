"""Packed trees among the replicas of a set, and over helpers: layouts, and what is proved of all routes.

Devices are numbered by their places: the replicas, then those that may help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import permutations
from typing import NamedTuple

from skyctl.errors import InputError
from skyctl.planner.data.replica_costs import ReplicaCosts
from skyctl.planner.routes.quick_trees import quickest_trees
from skyctl.planner.routes.route_choice import route_choices
from skyctl.planner.routes.route_layouts import DeviceRoute, Layout, Pair
from skyctl.planner.routes.route_network import RouteNetwork, RouteShare, Shared, Tree
from skyctl.planner.routes.tree_packing import Packing, pack_trees
from skyctl.planner.sum_costs import chunk_bytes_at
from skyctl.records.sync import LinkPrice, ProcessorPrice, RoutePrices

PRICE_ROUNDING = 1e-12
"""A bound is claimed that much lower, relative, than its prices prove: sums round."""


class PackedSet(NamedTuple):
    """The trees of a set of replicas.

    Attributes:
        layouts: from shallow trees to those with the least seconds a byte.
        byte_s: what no routes among the replicas, over those that may help, are faster than, on links, shared
            resources and helpers' processors.
        prices: that prove ``byte_s``; None where it is 0.
    """

    layouts: tuple[Layout, ...]
    byte_s: float
    prices: RoutePrices | None


def pack_set(model: ReplicaCosts, replicas: tuple[int, ...], deadline: float) -> PackedSet:
    """Packed trees of two replicas or more; where adding binds, also ones that spare processors.

    First without helpers, so that those are there too where a helper saves little.

    ``deadline``: when to take the best so far, in seconds of ``time.perf_counter``.
    """

    @cache
    def edge_s(pair: Pair) -> float:
        a, b = there[pair[0]], there[pair[1]]
        byte_s = model.line_byte_s(a, b)
        piece_bytes = min(chunk_bytes_at(byte_s, model.passes), model.total_bytes)
        return model.latency_s.get((a, b), 0.0) + piece_bytes * byte_s

    helpers = model.helpers_of(replicas)
    there = (*replicas, *helpers)
    tried: list[tuple[RouteNetwork, Packing]] = []
    for over in ((), helpers) if helpers else ((),):
        first_trees = [tree for _, packed in tried for tree in _own(packed)]
        tried += _packings(model, replicas, over, deadline, edge_s, first_trees)
    layouts = [
        Layout(replicas, trees=tuple(_device_route(route, there) for route in routes))
        for network, packed in tried
        for routes in route_choices(network, packed, edge_s)
    ]
    packing = next(packed for network, packed in tried if network.count == len(there))
    return PackedSet(tuple(dict.fromkeys(layouts)), packing.bound_byte_s, _prices(model, replicas, packing))


def _packings(
    model: ReplicaCosts,
    replicas: tuple[int, ...],
    helpers: tuple[int, ...],
    deadline: float,
    edge_s: Callable[[Pair], float],
    first_trees: Sequence[Tree],
) -> Iterator[tuple[RouteNetwork, Packing]]:
    """The best trees on links alone; those that spare processors; those without far links.

    ``first_trees``: trees to begin with; the others as in ``pack_set``.
    """
    wires = route_network(model, replicas, helpers)
    quick = quickest_trees(wires, edge_s)
    packing = pack_trees(wires, deadline, first_trees=(*quick, *first_trees))
    yield wires, packing
    processors = route_network(model, replicas, helpers, processors=True)
    if any(processors.add_byte_s) or any(processors.message_byte_s):
        yield processors, pack_trees(processors, deadline, first_trees=(*quick, *first_trees, *_own(packing)))
    near = _without_far_links(model, (*replicas, *helpers), wires, packing.byte_s)
    if near is not None:
        with suppress(InputError):  # the others alone do not join all replicas
            yield near, pack_trees(near, deadline)


def _own(packing: Packing) -> tuple[Tree, ...]:
    return tuple(route.tree for route in packing.routes)


def _without_far_links(
    model: ReplicaCosts, there: Sequence[int], network: RouteNetwork, byte_s: float
) -> RouteNetwork | None:
    """The network without links whose latency alone is more than all bytes take; None: there are none."""
    kept = {
        pair: seconds
        for pair, seconds in network.link_byte_s.items()
        if model.latency_s.get((there[pair[0]], there[pair[1]]), 0.0) <= byte_s * model.total_bytes
    }
    return None if len(kept) == len(network.link_byte_s) else replace(network, link_byte_s=kept)


def route_network(
    model: ReplicaCosts, replicas: Sequence[int], helpers: Sequence[int] = (), *, processors: bool = False
) -> RouteNetwork:
    """The network for routes among these replicas, over these helpers; pairs without a link are free.

    Args:
        processors: replicas' processors count, and not only helpers', which have nothing else to do.
    """
    there = (*replicas, *helpers)
    place = {d: i for i, d in enumerate(there)}
    pairs = [(a, b) for a in there for b in there if a != b]
    over: dict[int, tuple[float, list[Pair]]] = {}
    for a, b in pairs:
        for number, byte_s in model.shared.get((a, b), ()):
            over.setdefault(number, (byte_s, []))[1].append((place[a], place[b]))
    devices = [model.problem.devices[d] for d in there]
    counts = [processors or d in helpers for d in there]
    return RouteNetwork(
        count=len(there),
        replicas=tuple(range(len(replicas))),
        link_byte_s={(place[a], place[b]): model.byte_s.get((a, b), 0.0) for a, b in pairs},
        shared=[Shared(tuple(links), byte_s) for _, (byte_s, links) in sorted(over.items())],
        add_byte_s=[counted * device.reduce_byte_s for device, counted in zip(devices, counts, strict=True)],
        message_byte_s=[
            counted * device.message_byte_s for device, counted in zip(devices, counts, strict=True)
        ],
    )


def _device_route(route: RouteShare, there: Sequence[int]) -> DeviceRoute:
    tree = route.tree
    up = tuple((there[a], there[b]) for a, b in tree.up)
    down = tuple((there[a], there[b]) for a, b in tree.down)
    return DeviceRoute(route.share, there[tree.root], up, down)


def _prices(model: ReplicaCosts, replicas: Sequence[int], packing: Packing) -> RoutePrices | None:
    """A packing's prices by the problem's names and order."""
    if packing.bound_byte_s <= 0:
        return None
    there = (*replicas, *model.helpers_of(replicas))
    count = len(there)
    numbers = sorted({n for pair in permutations(there, 2) for n, _ in model.shared[pair]})
    links, shared, processors = [], [0.0] * len(model.problem.shared), []
    for resource, price in sorted(packing.prices.items()):
        if resource < count**2:
            source, target = (model.ids[there[i]] for i in divmod(resource, count))
            links.append(LinkPrice(source=source, target=target, price=price))
        elif resource < count**2 + len(numbers):
            shared[numbers[resource - count**2]] = price
        else:
            device = model.ids[there[resource - count**2 - len(numbers)]]
            processors.append(ProcessorPrice(device=device, price=price))
    while shared and shared[-1] == 0:
        shared.pop()
    return RoutePrices(
        devices=tuple(model.ids[d] for d in replicas),
        byte_s=packing.bound_byte_s * (1 - PRICE_ROUNDING),
        links=tuple(links),
        shared=tuple(shared),
        processors=tuple(processors),
    )
