"""The routes over which replicas sum gradients, a ring or a star, and what a byte of gradient uses there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from skyctl.errors import InputError
from skyctl.records.sync import Route

Pair = tuple[int, int]


class DeviceRoute(NamedTuple):
    """A route by device indices: ``up`` has pairs (child, parent), ``down`` pairs (parent, child)."""

    share: float
    root: int
    up: tuple[Pair, ...]
    down: tuple[Pair, ...]


class Layout(NamedTuple):
    """The replicas, ascending, and how they sum.

    Attributes:
        root: of a star, a replica or a helper; None: a ring, or one replica alone.
        trees: packed trees in the place of both.
        ring: the replicas in a ring's order; empty: as in ``replicas``.
    """

    replicas: tuple[int, ...]
    root: int | None = None
    trees: tuple[DeviceRoute, ...] = ()
    ring: tuple[int, ...] = ()

    def routes(self) -> tuple[DeviceRoute, ...]:
        """Packed trees, a star's only route, or a ring's, one for each replica, which is its root.

        In a ring, partial sums go once around to the root, beginning with the replica after it, and the sum
        once around from the root; none for one replica.
        """
        if len(self.replicas) == 1:
            return ()
        if self.trees:
            return self.trees
        if self.root is not None:
            others = [d for d in self.replicas if d != self.root]
            up = tuple((d, self.root) for d in others)
            return (DeviceRoute(1.0, self.root, up, tuple((self.root, d) for d in others)),)
        order = self.ring or self.replicas
        out = []
        for i, root in enumerate(order):
            after = [*order[i + 1 :], *order[:i]]
            up, down = tuple(pairwise([*after, root])), tuple(pairwise([root, *after]))
            out.append(DeviceRoute(1 / len(order), root, up, down))
        return tuple(out)

    def children(self) -> dict[int, int]:
        """By device, the edges that arrive at it with partial sums."""
        if self.trees or self.root is not None:
            return children_of(self.routes())
        return dict.fromkeys(self.replicas, len(self.replicas) - 1) if len(self.replicas) > 1 else {}

    def use(self, latency_s: Mapping[Pair, float]) -> RouteUse:
        """The links and devices that one byte uses on all routes; of a ring without looking at each of them.

        ``latency_s``: by link, 0 where there is none.
        """
        count = len(self.replicas)
        if self.trees or self.root is not None or count == 1:
            return use_of(self.routes(), latency_s)
        order = self.ring or self.replicas
        pairs = [*pairwise(order), (order[-1], order[0])]
        twice = 2 * (count - 1) / count  # partial sums leave out one link of the ring, sums another one
        hops_s = [latency_s.get(pair, 0.0) for pair in pairs]
        shortest_s = min(hops_s[i - 1] + hops_s[i] for i in range(count))
        return RouteUse(
            links=dict.fromkeys(pairs, twice),
            added=dict.fromkeys(order, twice / 2),
            passed=dict.fromkeys(order, 2 * twice),
            children=self.children(),
            latency_s=2 * math.fsum(hops_s) - shortest_s,
        )


class RouteUse(NamedTuple):
    """The links and devices that one byte of gradient uses on all of its routes together.

    Attributes:
        links: by link, bytes sent over it.
        added: by device, received bytes that it adds to its own.
        passed: by device, bytes that it sends and receives.
        children: by device, edges that arrive at it with partial sums.
        latency_s: of the longest way up to a root, and down from it.
    """

    links: dict[Pair, float]
    added: dict[int, float]
    passed: dict[int, float]
    children: dict[int, int]
    latency_s: float


def use_of(routes: Sequence[DeviceRoute], latency_s: Mapping[Pair, float]) -> RouteUse:
    """The links and devices that a byte uses on these routes.

    ``latency_s``: by link, 0 where there is none.
    """
    links: dict[Pair, float] = {}
    added: dict[int, float] = {}
    passed: dict[int, float] = {}
    longest_s = 0.0
    for route in routes:
        for pair in (*route.up, *route.down):
            links[pair] = links.get(pair, 0.0) + route.share
            for device in pair:
                passed[device] = passed.get(device, 0.0) + route.share
        for _, parent in route.up:
            added[parent] = added.get(parent, 0.0) + route.share
        up = {child: (parent, latency_s.get((child, parent), 0.0)) for child, parent in route.up}
        down = {child: (parent, latency_s.get((parent, child), 0.0)) for parent, child in route.down}
        longest_s = max(longest_s, _deepest_s(up) + _deepest_s(down))
    return RouteUse(links, added, passed, children_of(routes), longest_s)


def children_of(routes: Sequence[DeviceRoute]) -> dict[int, int]:
    """By device, the edges that arrive at it with partial sums."""
    return dict(Counter(parent for route in routes for _, parent in route.up))


def _deepest_s(parents: Mapping[int, tuple[int, float]]) -> float:
    """Seconds of the longest way between a tree's root and any other device of it."""
    reached_s: dict[int, float] = {}
    for device in parents:
        way = []
        at = device
        while at in parents and at not in reached_s:
            way.append(at)
            at = parents[at][0]
        taken_s = reached_s.get(at, 0.0)
        for passed in reversed(way):
            taken_s += parents[passed][1]
            reached_s[passed] = taken_s
    return max(reached_s.values(), default=0.0)


def busiest_byte_s(
    use: RouteUse,
    byte_s: Mapping[Pair, float],
    shared: Mapping[Pair, Sequence[tuple[int, float]]],
    scaled: Callable[[Pair], float] = lambda _pair: 1.0,
) -> float:
    """Seconds a byte of gradient takes on the busiest of links and shared resources, which work side by side.

    Args:
        scaled: by link, a factor on its seconds.
    """
    slowest_s = 0.0
    loads: dict[int, float] = {}
    for pair, used in use.links.items():
        factor = used * scaled(pair)
        slowest_s = max(slowest_s, factor * byte_s.get(pair, 0.0))
        for number, seconds in shared.get(pair, ()):
            loads[number] = loads.get(number, 0.0) + factor * seconds
    return max(slowest_s, *loads.values()) if loads else slowest_s


def route_records(routes: Sequence[DeviceRoute], ids: Sequence[str]) -> tuple[Route, ...]:
    """Routes as a plan's record has them; ``ids``: the devices' names."""

    def named(pairs: Sequence[Pair]) -> tuple[tuple[str, ...], ...]:
        return tuple((ids[a], ids[b]) for a, b in pairs)

    return tuple(
        Route(share=share, root=ids[root], up=named(up), down=named(down)) for share, root, up, down in routes
    )


def device_routes(routes: Sequence[Route], index: Mapping[str, int]) -> tuple[DeviceRoute, ...]:
    """A record's routes by device indices; InputError for a device that the problem lacks."""

    def at(name: str) -> int:
        if name not in index:
            raise InputError(f"a route names device {name!r}, which is not in the problem")
        return index[name]

    def pairs(edges: Sequence[Sequence[str]]) -> tuple[Pair, ...]:
        return tuple((at(a), at(b)) for a, b in edges)

    return tuple(
        DeviceRoute(route.share, at(route.root), pairs(route.up), pairs(route.down)) for route in routes
    )
