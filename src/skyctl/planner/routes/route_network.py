"""Resources of routes: directed links, what several of them share, and processors; all in seconds a byte."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Pair = tuple[int, int]


class Tree(NamedTuple):
    """A way for bytes: partial sums go up to the root, the sum comes down.

    ``up`` has pairs (child, parent), ``down`` pairs (parent, child), both in ascending order.
    """

    root: int
    up: tuple[Pair, ...]
    down: tuple[Pair, ...]


class RouteShare(NamedTuple):
    """The share of all bytes that goes over a tree."""

    share: float
    tree: Tree


class Shared(NamedTuple):
    """Links that share a resource, and the seconds that a byte over any of them takes there."""

    links: tuple[Pair, ...]
    byte_s: float


@dataclass(frozen=True)
class RouteNetwork:
    """Devices 0 … ``count`` − 1, of which ``replicas`` have numbers to sum; the others may help.

    Attributes:
        link_byte_s: by link that there is, the seconds that a byte takes on it, 0 or more.
        shared: what several links share.
        add_byte_s: by device, processor seconds to add a received byte to its own.
        message_byte_s: by device, processor seconds to send or to receive a byte.
    """

    count: int
    replicas: tuple[int, ...]
    link_byte_s: Mapping[Pair, float]
    shared: Sequence[Shared] = ()
    add_byte_s: Sequence[float] = ()
    message_byte_s: Sequence[float] = ()
    helpers: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        held = set(self.replicas)
        object.__setattr__(self, "helpers", tuple(d for d in range(self.count) if d not in held))

    @property
    def resources(self) -> int:
        """How many resources there are: a link's number is source · count + target; shared ones and then
        processors follow."""
        return self.count**2 + len(self.shared) + self.count


class ResourceUse(NamedTuple):
    """Seconds that a byte of a tree takes on resources: their numbers, ascending, and the seconds."""

    resources: Ints
    seconds: Floats


class EdgeCosts(NamedTuple):
    """The costs of edges at given prices, [child, parent] upwards and [parent, child] downwards."""

    up: Floats
    down: Floats


class ResourcePricing:
    """A network as arrays: what trees use, and what edges cost at given prices of resources."""

    def __init__(self, network: RouteNetwork) -> None:
        self.network = network
        count = network.count
        self._byte_s = np.zeros((count, count))
        self._missing = np.ones((count, count), dtype=bool)
        for (source, target), seconds in network.link_byte_s.items():
            self._byte_s[source, target] = seconds
            self._missing[source, target] = False
        self._add_s = np.array(network.add_byte_s or [0.0] * count, dtype=float)
        self._message_s = np.array(network.message_byte_s or [0.0] * count, dtype=float)
        self._shared_at = [tuple(np.array(x.links, dtype=int).reshape(-1, 2).T) for x in network.shared]
        self._shared_of: dict[Pair, list[tuple[int, float]]] = {}
        for number, resource in enumerate(network.shared):
            for pair in resource.links:
                self._shared_of.setdefault(pair, []).append((count**2 + number, resource.byte_s))

    def edge_costs(self, prices: Floats) -> EdgeCosts:
        """The cost of a byte over every edge; infinite where there is no link.

        ``prices``: by resource, of one second of it.
        """
        count = self.network.count
        both = prices[: count**2].reshape(count, count) * self._byte_s
        for number, resource in enumerate(self.network.shared):
            if price := float(prices[count**2 + number]):
                both[self._shared_at[number]] += price * resource.byte_s
        processors = prices[count**2 + len(self.network.shared) :]
        handled = processors * self._message_s
        both = both + handled[:, None] + handled[None, :]
        both[self._missing] = np.inf
        return EdgeCosts(both + (processors * self._add_s)[None, :], both)

    def use_of(self, tree: Tree) -> ResourceUse:
        """The resources that a byte over a tree uses, without those of which it takes no time."""
        count, shared = self.network.count, len(self.network.shared)
        used: dict[int, float] = {}
        for edges, adds in ((tree.up, True), (tree.down, False)):
            for source, target in edges:
                of_edge = [
                    (source * count + target, float(self._byte_s[source, target])),
                    *self._shared_of.get((source, target), ()),
                    (count**2 + shared + source, float(self._message_s[source])),
                    (count**2 + shared + target, float(self._message_s[target])),
                    (count**2 + shared + target, float(self._add_s[target]) if adds else 0.0),
                ]
                for resource, seconds in of_edge:
                    if seconds > 0:
                        used[resource] = used.get(resource, 0.0) + seconds
        numbers = sorted(used)
        return ResourceUse(np.array(numbers, dtype=np.int64), np.array([used[x] for x in numbers]))

    def busiest_byte_s(self, routes: Iterable[RouteShare]) -> float:
        """Seconds that a byte takes on the busiest resource, with each share over its tree."""
        loads = np.zeros(self.network.resources)
        for share, tree in routes:
            use = self.use_of(tree)
            loads[use.resources] += share * use.seconds
        return float(loads.max(initial=0.0))
