"""The tables of the round-trip bound on devices and links: what devices can hold, and what messages cost.

A device holds whole layers within seconds and bytes, valued at one price per layer. Devices with fast links
among them and slow ones between are clusters. Of a message's cost only ranges are kept, [least, most] seconds
of one message there and one back over a boundary, latencies included, each link uncontended: for a bound the
least counts as time, the most as room.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from skyctl.planner.cost_model import Array, CostModel

MARGIN = 1e-9
RATIO = 1.5
"""Two consecutive costs, sorted, whose ratio is at least this separate near from far."""
MAX_CLUSTERS = 8

CostRange = tuple[float, float]


class DeviceCapacity:
    """The most that each device can hold within a time: prices of layers, whole layers, memory.

    A layer's price is the least share of any device's time for everything; prices sum to 1 after scaling.
    ``rate[d]``: most price a second; ``least[d]``: least seconds of a stage with more than tiny layers, of
    which there are ``tiny``; ``forward``, ``backward``: their least shares of a layer's time.
    """

    def __init__(
        self, model: CostModel, most_s: float, keep_deadline: Callable[[], None] = lambda: None
    ) -> None:
        """Reckons what devices can hold in up to ``most_s`` seconds.

        ``keep_deadline``: asked before each long table; ends by an error of its own when time is out.
        """
        self.model = model
        self.most_s = most_s
        self._keep_deadline = keep_deadline
        times = np.stack([np.diff(model.work_s.array(d)) for d in range(model.devices)])
        whole = times.sum(axis=1)
        shares = np.divide(times, whole[:, None], out=np.zeros_like(times), where=whole[:, None] > 0)
        prices = shares.min(axis=0)
        total = float(prices.sum())
        self.prices = prices / total if total > 0 else prices
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(self.prices > 0, self.prices / times, 0.0)
        self.rate = np.where(np.isfinite(ratio), ratio, np.inf).max(axis=1)
        self.usable = bool(np.isfinite(self.rate).all() and (self.rate > 0).all())
        small = self.prices < 0.2 * float(np.median(self.prices))
        self.tiny = int(small.sum())
        self.least = times[:, ~small].min(axis=1)
        forward = np.stack([np.diff(model.forward_s.array(d)) for d in range(model.devices)])
        share = np.divide(forward, times, out=np.full_like(times, 0.5), where=times > 0)
        self.forward, self.backward = float(share.min()), float(1 - share.max())
        # all the price at the best rate there is
        best = float(self.rate.max())
        self.shortest = (1 - MARGIN) / best if self.usable else 0.0
        self._most: dict[tuple[int, float], float] = {}
        self._tables: dict[tuple[int, int], tuple[Array, Array]] = {}

    def most(self, device: int, cap_s: float) -> float:
        """The most price within that time, memory as in the last stage."""
        if (device, cap_s) not in self._most:
            times, masses = self._table(device, 1)
            at = int(np.searchsorted(times, cap_s * (1 + 1e-12), side="right"))
            self._most[device, cap_s] = float(masses[at])
        return self._most[device, cap_s]

    def gain(self, device: int, cap: Array, in_flight: int, mus: Array) -> Array:
        """max over t of (price − μ t), shape (caps, μ), for a stage that holds a layer."""
        times, masses = self._table(device, 1 if self.model.unlimited else in_flight)
        at = np.searchsorted(times, cap * (1 + 1e-12), side="right")
        mass = masses[at]
        rate, least = self.rate[device], self.least[device]
        most = np.maximum(mass / rate, least)
        net = rate - mus[None, :]
        out: Array = np.where(net >= 0, net * most[:, None], net * least)
        return out

    def _table(self, device: int, in_flight: int) -> tuple[Array, Array]:
        """(range times ascending, most price within each; one longer, the first 0)."""
        key = (device, in_flight)
        if key not in self._tables:
            model = self.model
            work = model.work_s.array(device)
            price = np.concatenate([[0.0], np.cumsum(self.prices)])
            times, masses = [], []
            for width in range(1, model.layers + 1):
                self._keep_deadline()
                spent = work[width:] - work[:-width]
                fit = spent <= self.most_s * (1 + 1e-9)
                if not fit.any():
                    break
                if (
                    not model.unlimited
                ):  # a longer range may fit where a shorter one does not: receive windows
                    fit &= [
                        bool(ok) and model.fits(device, p, p + width, in_flight) for p, ok in enumerate(fit)
                    ]
                times.append(spent[fit])
                masses.append((price[width:] - price[:-width])[fit])
            if times:
                time_s, mass = np.concatenate(times), np.concatenate(masses)
                order = np.argsort(time_s, kind="stable")
                table = time_s[order], np.concatenate([[0.0], np.maximum.accumulate(mass[order])])
            else:
                table = np.zeros(0), np.zeros(1)
            self._tables[key] = table
        return self._tables[key]


@dataclass(frozen=True)
class LinkClusters:
    """``members``: the devices of each cluster. ``between[g, h]``: the range of costs from g to h (g = h:
    inside, (0, 0) for a cluster of one device)."""

    members: tuple[tuple[int, ...], ...]
    between: dict[tuple[int, int], CostRange]
    least: tuple[tuple[float, ...], ...]
    least_anywhere: tuple[float, ...]

    def inside(self) -> CostRange:
        """The range of costs within a cluster, over all clusters."""
        return _hull([self.between[g, g] for g, cluster in enumerate(self.members) if len(cluster) > 1])

    def across(self) -> CostRange:
        """The range of costs between clusters, over all pairs."""
        return _hull([cost for (g, h), cost in self.between.items() if g != h])


def cluster_devices(model: CostModel) -> LinkClusters:
    """Clusters by single linkage, cut at the largest step of the sorted costs; without one, one cluster."""
    costs = _costs(model)
    members = _grouped(model, costs)
    between = {}
    for g, here in enumerate(members):
        for h, there in enumerate(members):
            between[g, h] = _hull([costs[a, b] for a in here for b in there if a != b])
    least = tuple(_forest(cluster, costs) for cluster in members)
    return LinkClusters(members, between, least, _forest(tuple(range(model.devices)), costs))


def _forest(devices: tuple[int, ...], costs: dict[tuple[int, int], CostRange]) -> tuple[float, ...]:
    """[n]: the sum of the first n edges that Kruskal's rule takes, which no n edges without a circle
    undercut."""
    group = {d: {d} for d in devices}
    out = [0.0]
    for a, b in sorted(itertools.combinations(devices, 2), key=lambda pair: costs[pair][0]):
        if group[a] is not group[b]:
            group[a] |= group[b]
            group.update(dict.fromkeys(group[b], group[a]))
            out.append(out[-1] + costs[a, b][0])
    return tuple(out)


def _costs(model: CostModel) -> dict[tuple[int, int], CostRange]:
    sizes = model.output_bytes[:-1] or [0.0]
    small, large = min(sizes), max(sizes)
    out = {}
    for a in range(model.devices):
        for b in range(model.devices):
            if a != b:
                links = (model.link_cost(a, b), model.link_cost(b, a))
                rate = sum(link.slowest_s_per_byte for link in links)
                latency = sum(link.latency_s for link in links)
                out[a, b] = (small * rate + latency, large * rate + latency)
    return out


def _grouped(model: CostModel, costs: dict[tuple[int, int], CostRange]) -> tuple[tuple[int, ...], ...]:
    whole = (tuple(range(model.devices)),)
    ranked = sorted({cost for _, cost in costs.values()})
    ranked = [cost for cost in ranked if cost > 0]
    steps = [(far / near, near) for near, far in pairwise(ranked)]
    if any(cost == 0 for _, cost in costs.values()) and ranked:
        steps.append((float("inf"), 0.0))
    if not steps or max(steps)[0] < RATIO:
        return whole
    near = max(steps)[1]
    label = list(range(model.devices))
    for (a, b), (_, cost) in sorted(costs.items()):
        if cost <= near and label[a] != label[b]:
            low, high = sorted((label[a], label[b]))
            label = [low if x == high else x for x in label]
    names = sorted(set(label))
    if len(names) > MAX_CLUSTERS:
        return whole
    return tuple(tuple(d for d in range(model.devices) if label[d] == name) for name in names)


def _hull(ranges: list[CostRange]) -> CostRange:
    if not ranges:
        return (0.0, 0.0)
    return (min(low for low, _ in ranges), max(high for _, high in ranges))
