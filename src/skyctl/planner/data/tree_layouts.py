"""Packed trees among the holders of a set: their layouts, and what is proved of all routes among them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import permutations
from typing import NamedTuple

from skyctl.errors import InputError
from skyctl.planner.data.holder_costs import CHUNK_BYTES, DataModel
from skyctl.planner.data.route_fill import line_byte_s
from skyctl.planner.data.route_layouts import DeviceRoute, Layout, Pair, busiest_byte_s, use_of
from skyctl.planner.routes.quick_trees import quickest_trees
from skyctl.planner.routes.route_choice import route_choices
from skyctl.planner.routes.route_network import RouteNetwork, RouteShare, Shared, Tree
from skyctl.planner.routes.tree_packing import Packing, pack_trees
from skyctl.records.sync import LinkPrice, RoutePrices

MOST_RING_HOLDERS = 7
"""Holders up to which rings in every order are looked at."""
PRICE_ROUNDING = 1e-12
"""A bound is claimed that much lower, relative, than its prices prove: sums round."""


class PackedSet(NamedTuple):
    """The trees of a set of holders.

    Attributes:
        layouts: from shallow trees to those with the least seconds a byte.
        byte_s: what no routes among the holders are faster than, on links and shared resources.
        prices: that prove ``byte_s``; None where it is 0.
    """

    layouts: tuple[Layout, ...]
    byte_s: float
    prices: RoutePrices | None


def pack_set(model: DataModel, holders: tuple[int, ...], deadline: float) -> PackedSet:
    """Packed trees of two holders or more; where adding binds, also ones that spare processors.

    ``deadline``: when to take the best so far, in seconds of ``time.perf_counter``.
    """

    def edge_s(pair: Pair) -> float:
        a, b = holders[pair[0]], holders[pair[1]]
        message_bytes = min(CHUNK_BYTES, model.total_bytes)
        return model.latency_s.get((a, b), 0.0) + message_bytes * line_byte_s(model, a, b)

    wires = route_network(model, holders)
    quick = quickest_trees(wires, edge_s)
    packing = pack_trees(wires, deadline, known=quick)
    tried = [(wires, packing)]
    processors = route_network(model, holders, processors=True)
    if any(processors.add_byte_s) or any(processors.message_byte_s):
        tried.append((processors, pack_trees(processors, deadline, known=(*quick, *_own(packing)))))
    near = _without_far_links(model, holders, wires, packing.byte_s)
    if near is not None:
        with suppress(InputError):  # the others alone do not join all holders
            tried.append((near, pack_trees(near, deadline)))
    layouts = [
        Layout(holders, trees=tuple(_device_route(route, holders) for route in routes))
        for network, packed in tried
        for routes in route_choices(network, packed, edge_s)
    ]
    return PackedSet(tuple(dict.fromkeys(layouts)), packing.bound_byte_s, _prices(model, holders, packing))


def _own(packing: Packing) -> tuple[Tree, ...]:
    return tuple(route.tree for route in packing.routes)


def _without_far_links(
    model: DataModel, holders: Sequence[int], network: RouteNetwork, byte_s: float
) -> RouteNetwork | None:
    """The network without links whose latency alone is more than all bytes take; None: there are none."""
    kept = {
        pair: seconds
        for pair, seconds in network.link_byte_s.items()
        if model.latency_s.get((holders[pair[0]], holders[pair[1]]), 0.0) <= byte_s * model.total_bytes
    }
    return None if len(kept) == len(network.link_byte_s) else replace(network, link_byte_s=kept)


def route_network(model: DataModel, holders: Sequence[int], *, processors: bool = False) -> RouteNetwork:
    """What routes among these holders may use, by their places among them; what has no link is free."""
    place = {d: i for i, d in enumerate(holders)}
    pairs = [(a, b) for a in holders for b in holders if a != b]
    over: dict[int, tuple[float, list[Pair]]] = {}
    for a, b in pairs:
        for number, byte_s in model.shared.get((a, b), ()):
            over.setdefault(number, (byte_s, []))[1].append((place[a], place[b]))
    devices = [model.problem.devices[d] for d in holders] if processors else []
    return RouteNetwork(
        count=len(holders),
        holders=tuple(range(len(holders))),
        link_byte_s={(place[a], place[b]): model.byte_s.get((a, b), 0.0) for a, b in pairs},
        shared=[Shared(tuple(links), byte_s) for _, (byte_s, links) in sorted(over.items())],
        add_byte_s=[device.reduce_byte_s for device in devices],
        message_byte_s=[device.message_byte_s for device in devices],
    )


def _device_route(route: RouteShare, holders: Sequence[int]) -> DeviceRoute:
    tree = route.tree
    up = tuple((holders[a], holders[b]) for a, b in tree.up)
    down = tuple((holders[a], holders[b]) for a, b in tree.down)
    return DeviceRoute(route.share, holders[tree.root], up, down)


def _prices(model: DataModel, holders: Sequence[int], packing: Packing) -> RoutePrices | None:
    """A packing's prices by the problem's names and order."""
    if packing.bound_byte_s <= 0:
        return None
    count = len(holders)
    numbers = sorted({n for pair in model.shared if set(pair) <= set(holders) for n, _ in model.shared[pair]})
    links, shared = [], [0.0] * len(model.problem.shared)
    for resource, price in sorted(packing.prices.items()):
        if resource < count**2:
            source, target = (model.ids[holders[i]] for i in divmod(resource, count))
            links.append(LinkPrice(source=source, target=target, price=price))
        else:
            shared[numbers[resource - count**2]] = price
    while shared and shared[-1] == 0:
        shared.pop()
    return RoutePrices(
        devices=tuple(model.ids[d] for d in holders),
        byte_s=packing.bound_byte_s * (1 - PRICE_ROUNDING),
        links=tuple(links),
        shared=tuple(shared),
    )


def best_ring_byte_s(model: DataModel, holders: Sequence[int]) -> float:
    """Seconds a byte of the fastest ring one way around the holders, in any order where they are few."""
    if len(holders) > MOST_RING_HOLDERS:
        return _ring_byte_s(model, tuple(holders))
    first, *others = holders
    return min(_ring_byte_s(model, (first, *order)) for order in permutations(others))


def _ring_byte_s(model: DataModel, order: tuple[int, ...]) -> float:
    return busiest_byte_s(use_of(Layout(order).routes(), {}), model.byte_s, model.shared)
