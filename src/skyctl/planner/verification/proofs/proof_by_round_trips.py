"""Is there a plan whose step takes less than a limit, for many devices? By what a microbatch's trip allows.

The trip of one microbatch goes through all stages and back; it takes P. Stage s begins u_s into it (way there
and way back counted together) and ends at v_s = u_s + t_s, its forward and backward. With k_s in flight and M
microbatches, each of these is a chain of waiting in every play of the schedule, so no step is shorter:

- u_s + M t_s
- v_e + (M − 1) forwards and (M − k_s)⁺ + k_e − 1 backwards of s: all its forwards, the last of them out to
  stage e and back, its last backwards; or backwards and forwards the other way round
- for M > k_s, begin(a) + turns(e) + end(b) + u_s, where begin(a) = v_a − u_s + (k_a − 1) forwards of s leads
  to its first backward's end, end(b) likewise with backwards from its last forward on, and in between, for
  the M − 1 − k_s microbatches left, v_e − u_s for every k_s − k_e + 1 of them (out to stage e and back).

So for a limit and an interval of P every u_s, v_s and t_s lies between two numbers, found by going
through the pipeline there and back. The devices must then be able to hold the whole model, in whole layers
within t_s and with all t_s within P less the links. Else no plan of that shape is below the limit. Shapes are
gone through from coarse to fine: all plans of a number of stages; where that does not rule them out and links
fall into near and far ones, those that cross between sites so or so often; for each number of crossings,
where these are fewer than the sites, the orders of the sites with numbers of devices in each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from skyctl.planner.verification.problem_data import ROUND, Array, Bools, DeviceBudget, ProblemData, Proof
from skyctl.schedule.actions import EAGER, least_in_flight

STEP = 1.5
"""Two costs of links this far apart, one after the other in size, are near and far."""
MAX_SITES = 8
MAX_ORDERS = 6000
MAX_TABLE = 4_000_000
INTERVALS = 32
HALVINGS = 10

Range = tuple[float, float]


class TripLinks(NamedTuple):
    """``each``: the range of every boundary's cost. ``crossings``: how many are far, at least and at most,
    where it is not known which; None where it is."""

    each: tuple[Range, ...]
    crossings: tuple[int, int] | None
    near: Range
    far: Range

    def least(self, start: int, stop: int) -> float:
        """Of the boundaries [start, stop) together."""
        if self.crossings is None:
            return sum(low for low, _ in self.each[start:stop])
        sure = max(0, self.crossings[0] - (len(self.each) - (stop - start)))
        return sure * self.far[0] + (stop - start - sure) * self.near[0]

    def most(self, start: int, stop: int) -> float:
        """Of the boundaries [start, stop) together."""
        if self.crossings is None:
            return sum(high for _, high in self.each[start:stop])
        far = min(stop - start, self.crossings[1])
        return far * self.far[1] + (stop - start - far) * self.near[1]


class TripSegment(NamedTuple):
    """``stages`` stages in a row on some of these devices."""

    devices: tuple[int, ...]
    stages: int


def prove(facts: ProblemData, below_s: float) -> Proof:
    """Whether no plan's step takes less than ``below_s``."""
    ranges = facts.devices * facts.layers * min(facts.layers, 1 + 8 * facts.layers // facts.devices)
    if ranges > MAX_TABLE:
        return Proof(None, "too many ranges of layers for the trips' tables")
    trips = _Trips(facts, below_s)
    if not trips.store.usable:
        return Proof(None, "some devices take no time, which trips can't count with")
    for stages in range(1, facts.most_stages + 1):
        if not trips.no_plans(stages, 0, stages - 1 if len(trips.sites) > 1 else 0):
            return Proof(None, f"trips do not rule out a plan of {stages} stages below the bound")
    shapes = f"{trips.shapes} shapes of pipelines"
    return Proof(True, f"no trip of a microbatch leaves room for the model ({shapes})")


class _Trips:
    """One limit on the step of one problem."""

    def __init__(self, facts: ProblemData, below_s: float) -> None:
        self.facts = facts
        self.m = facts.microbatches
        self.eager = facts.problem.schedule == EAGER
        self.limit = below_s
        self.store = DeviceBudget(facts, below_s / self.m)
        self.costs = _link_costs(facts)
        self._joined: dict[tuple[int, ...], list[float]] = {}
        self.sites = _sites(facts.devices, self.costs)
        self.near = _hull([self._cost(site, site) for site in self.sites if len(site) > 1])
        self.far = _hull([self._cost(a, b) for a, b in itertools.permutations(self.sites, 2)])
        self.shapes = 0

    def no_plans(self, stages: int, least: int, most: int) -> bool:
        """Whether no plan with so many stages and ``least`` to ``most`` crossings is below the limit."""
        self.shapes += 1
        if self.impossible(self._scattered(stages, least, most), [self._anywhere(stages)]):
            return True
        if least < most:
            listed = len(self.sites) - 1  # most crossings whose orders are listed
            middle = listed if least <= listed < most else (least + most) // 2
            return self.no_plans(stages, least, middle) and self.no_plans(stages, middle + 1, most)
        if most >= len(self.sites):
            return False
        orders = list(itertools.islice(self._orders(stages, most + 1), MAX_ORDERS))
        if len(orders) == MAX_ORDERS:
            return False
        self.shapes += len(orders)
        grouped: dict[tuple[Range, ...], list[tuple[TripSegment, ...]]] = {}
        for layout in orders:
            grouped.setdefault(self._links(layout), []).append(layout)
        return all(
            self.impossible(TripLinks(each, None, self.near, self.far), layouts)
            for each, layouts in grouped.items()
        )

    def _anywhere(self, stages: int) -> tuple[TripSegment, ...]:
        return (TripSegment(tuple(range(self.facts.devices)), stages),)

    def _scattered(self, stages: int, least: int, most: int) -> TripLinks:
        """The costs of boundaries of which so many are far, whichever."""
        if not most:
            return TripLinks((self.near,) * (stages - 1), (0, 0), self.near, self.far)
        low, high = _hull([self.near, self.far])
        near, far = (low, self.near[1]), (self.far[0], high)
        return TripLinks(((low, high),) * (stages - 1), (least, most), near, far)

    def _cost(self, here: tuple[int, ...], there: tuple[int, ...]) -> Range:
        return _hull([self.costs[a, b] for a in here for b in there if a != b])

    def _orders(self, stages: int, count: int) -> Iterator[tuple[TripSegment, ...]]:
        for order in itertools.product(self.sites, repeat=count):
            if any(a == b for a, b in itertools.pairwise(order)):
                continue
            for cuts in itertools.combinations(range(1, stages), count - 1):
                sizes = [b - a for a, b in itertools.pairwise((0, *cuts, stages))]
                if all(
                    sum(size for size, other in zip(sizes, order, strict=True) if other == site) <= len(site)
                    for site in order
                ):
                    yield tuple(TripSegment(site, size) for site, size in zip(order, sizes, strict=True))

    def _links(self, layout: tuple[TripSegment, ...]) -> tuple[Range, ...]:
        out: list[Range] = []
        for i, part in enumerate(layout):
            if i:
                out.append(self._cost(layout[i - 1].devices, part.devices))
            out += [self._cost(part.devices, part.devices)] * (part.stages - 1)
        return tuple(out)

    def impossible(self, links: TripLinks, layouts: list[tuple[TripSegment, ...]]) -> bool:
        """Whether no plan with these links and one of these layouts is below the limit."""
        layouts = [layout for layout in layouts if self._enough(layout)]
        if not layouts:
            return True
        stages = len(links.each) + 1
        least = links.least(0, stages - 1) + self.store.least_trip
        # the first stage waits for one trip before its first backward, for another after its last forward
        waits = not self.eager and self.m > self._least_in_flight(0, stages)
        longest = self.limit / 2 if waits else self.limit
        if least > longest:
            return True
        edges = np.linspace(least, longest, INTERVALS + 1)
        first = self._most_times(links, edges[:-1], edges[1:])
        return all(self._ruled_out(layout, links, edges, first) for layout in layouts)

    def _least_links(self, layout: tuple[TripSegment, ...], links: TripLinks) -> float:
        """The least that all boundaries cost together: inside a part, as many of the cheapest links as join
        devices without a circle."""
        if links.crossings is not None:
            joined = sum(self._join(layout[0].devices)[: len(links.each)])
            return max(joined, links.least(0, len(links.each)))
        total = 0.0
        at = -1
        for part in layout:
            if at >= 0:
                total += links.each[at][0]
            at += part.stages
            joined = sum(self._join(part.devices)[: part.stages - 1])
            total += max(joined, links.least(at - part.stages + 1, at))
        return total

    def _join(self, devices: tuple[int, ...]) -> list[float]:
        if devices not in self._joined:
            group = {d: {d} for d in devices}
            out = self._joined[devices] = []
            for a, b in sorted(itertools.combinations(devices, 2), key=lambda pair: self.costs[pair][0]):
                if group[a] is not group[b]:
                    out.append(self.costs[a, b][0])
                    group[a] |= group[b]
                    for d in group[b]:
                        group[d] = group[a]
        return self._joined[devices]

    def _enough(self, layout: tuple[TripSegment, ...]) -> bool:
        """Whether the best devices could hold the model were each busy all the time."""
        held = 0.0
        for part in _merged(layout):
            most = (float(self.store.most(d, 1, np.array([self.limit / self.m]))[0]) for d in part.devices)
            held += sum(sorted(most, reverse=True)[: part.stages])
        return held >= 1 - ROUND

    def _ruled_out(
        self, layout: tuple[TripSegment, ...], links: TripLinks, edges: Array, first: tuple[Array, Bools]
    ) -> bool:
        low, high = edges[:-1], edges[1:]
        most, stands = first
        for halving in range(HALVINGS + 1):
            stands = stands.copy()
            stands[stands] = self._room(layout, links, most[:, stands], high[stands])
            low, high = low[stands], high[stands]
            if not len(low):
                return True
            if halving < HALVINGS:
                middle = (low + high) / 2
                low, high = np.concatenate([low, middle]), np.concatenate([middle, high])
                most, stands = self._most_times(links, low, high)
        return False

    def _most_times(self, links: TripLinks, low: Array, high: Array) -> tuple[Array, Bools]:
        """(most seconds of a stage (stages, intervals), which intervals [low, high] of P are possible)."""
        count = len(links.each) + 1
        in_flight = [self.m if self.eager else self._least_in_flight(s, count) for s in range(count)]
        least = np.array([a for a, _ in links.each] + [0.0])
        most = np.array([b for _, b in links.each] + [0.0])
        left = [links.least(s, count - 1) for s in range(count)]
        width = len(low)
        u_low, v_low = np.zeros((count, width)), np.zeros((count, width))
        u_high, v_high = np.tile(high, (count, 1)), np.tile(high, (count, 1))
        u_high[0] = 0.0
        v_low[-1] = low
        times = np.zeros((count, width))
        possible: Bools = np.ones(width, dtype=bool)
        for _ in range(2):
            for s in range(count):
                time = self._longest(s, in_flight, (u_low[s], u_high[s], v_low))
                possible &= time >= 0
                end = np.minimum(u_high[s] + time, high - left[s])
                for a in range(s + 1):  # out from a to s and back, again and again
                    turns, rest = self._turns(in_flight, a, s)
                    if turns:
                        idle = least[a : a + max(0, rest - 1)].sum()
                        slack = self.limit - 2 * low + u_high[a] - idle
                        possible &= slack >= 0
                        end = np.minimum(end, u_high[a] + slack / turns)
                v_high[s] = np.minimum(v_high[s], end)
                times[s] = np.clip(np.minimum(time, v_high[s] - u_low[s]), 0.0, None)
                possible &= v_high[s] >= u_low[s] - ROUND * self.limit
                if s + 1 < count:
                    reach = times[: s + 1].sum(axis=0) + links.most(0, s + 1)
                    u_high[s + 1] = np.minimum(np.minimum(v_high[s] + most[s], reach), high - left[s + 1])
            possible &= v_high[-1] >= low - ROUND * self.limit
            for s in reversed(range(count)):
                u_low[s] = np.maximum(u_low[s], v_low[s] - times[s])
                rest = times[s:].sum(axis=0) + links.most(s, count - 1)
                u_low[s] = np.maximum(u_low[s], low - rest)
                for e in range(s, count):
                    turns, _ = self._turns(in_flight, s, e)
                    if turns:
                        slack = self.limit - 2 * low
                        u_low[s] = np.maximum(u_low[s], (turns * v_low[e] - slack) / (turns + 1))
                if s:
                    v_low[s - 1] = np.maximum(v_low[s - 1], u_low[s] - most[s - 1])
            possible &= u_low[0] <= ROUND * self.limit
        return times, possible

    def _least_in_flight(self, stage: int, stages: int) -> int:
        """In flight of a stage (for eager 1F1B only the least is known)."""
        return least_in_flight(self.facts.problem.schedule, stage, stages, self.m)

    def _turns(self, in_flight: list[int], start: int, end: int) -> tuple[int, int]:
        """(how many turns from one stage to another and back, how many microbatches left over)."""
        if self.m <= in_flight[start]:
            return 0, 0
        return divmod(self.m - 1 - in_flight[start], in_flight[start] - in_flight[end] + 1)

    def _longest(self, s: int, in_flight: list[int], at: tuple[Array, Array, Array]) -> Array:
        """Most seconds of stage s, whatever its share of them is forward."""
        u_low, u_high, v_low = at
        m, k = self.m, in_flight[s]
        store, last = self.store, len(in_flight) - 1
        time: Array = (self.limit - u_low) / m
        for e in range(s, last + 1):
            others = max(0, m - k) + self._least_in_flight(e, last + 1) - 1
            weight = max(
                (m - 1) * store.forward + others * store.backward,
                others * store.forward + (m - 1) * store.backward,
            )
            if weight > 0:
                time = np.minimum(time, (self.limit - v_low[e]) / weight)
        if m <= k:
            return time
        for begin, end in [*((e, e) for e in range(s, last + 1)), *((e, last) for e in range(s, last))] + [
            (last, e) for e in range(s, last)
        ]:
            share = (in_flight[begin] - 1) * self.store.forward + (in_flight[end] - 1) * self.store.backward
            weight = share + m - 1 - k
            if weight > 0:
                time = np.minimum(time, (self.limit + u_high - v_low[begin] - v_low[end]) / weight)
        return time

    def _room(self, layout: tuple[TripSegment, ...], links: TripLinks, most: Array, high: Array) -> Bools:
        """In which intervals the devices might hold the whole model.

        Weak duality with one price λ on the seconds: what is held is at most λ · (P − links) plus, for the
        best devices of each part, the most of (held − λ · seconds).
        """
        store = self.store
        rates = np.unique(np.append(store.rate, 0.0))
        if len(rates) > 24:
            rates = rates[np.linspace(0, len(rates) - 1, 24).astype(int)]
        stages = len(links.each) + 1
        spare = high - self._least_links(layout, links) + store.small_stages
        held = rates[None, :] * spare[:, None]
        caps: dict[tuple[int, ...], tuple[Array, int]] = {}  # most seconds, least in flight
        at = 0
        for part in layout:
            cap = most[at : at + part.stages].max(axis=0)
            at += part.stages
            before, fewest = caps.get(part.devices, (cap, self.m))
            caps[part.devices] = np.maximum(cap, before), min(fewest, self._least_in_flight(at - 1, stages))
        for part in _merged(layout):
            cap, in_flight = caps[part.devices]
            worth = []
            for d in part.devices:
                room = np.maximum(store.most(d, in_flight, cap) / store.rate[d], store.least[d])[:, None]
                net = store.rate[d] - rates[None, :]
                worth.append(np.maximum(net * room, net * store.least[d]))
            held += np.sort(np.stack(worth), axis=0)[-part.stages :].sum(axis=0)
        return np.asarray(held.min(axis=1) >= 1 - ROUND)


def _merged(layout: tuple[TripSegment, ...]) -> list[TripSegment]:
    """One part a site, wherever its stages are."""
    stages: dict[tuple[int, ...], int] = {}
    for part in layout:
        stages[part.devices] = stages.get(part.devices, 0) + part.stages
    return [TripSegment(devices, count) for devices, count in stages.items()]


def _link_costs(facts: ProblemData) -> dict[tuple[int, int], Range]:
    """Per pair, seconds of one message there and one back, for the smallest and the largest message."""
    problem = facts.problem
    sizes = [layer.output_bytes for layer in problem.layers[:-1]] or [0.0]
    index = {device.id: d for d, device in enumerate(problem.devices)}
    rate = np.zeros((facts.devices, facts.devices))
    latency = np.zeros_like(rate)
    sent = np.ones_like(rate)
    for link in problem.links:
        a, b = index[link.source], index[link.target]
        rate[a, b], latency[a, b] = link.sent_share / link.bandwidth_bytes_per_s, link.latency_s
        sent[a, b] = link.sent_share
    for resource in problem.shared:
        for source, target in resource.links:
            a, b = index[source], index[target]
            rate[a, b] = max(rate[a, b], sent[a, b] / resource.bandwidth_bytes_per_s)
    rate, latency = rate + rate.T, latency + latency.T
    return {
        (a, b): (
            float(min(sizes) * rate[a, b] + latency[a, b]),
            float(max(sizes) * rate[a, b] + latency[a, b]),
        )
        for a, b in itertools.permutations(range(facts.devices), 2)
    }


def _sites(devices: int, costs: dict[tuple[int, int], Range]) -> list[tuple[int, ...]]:
    """Groups of devices with no far link needed inside; one group where nothing is clearly far."""
    everyone = [tuple(range(devices))]
    values = sorted({cost for _, cost in costs.values()})
    gaps = [(b / a if a > 0 else np.inf, a) for a, b in itertools.pairwise(values)]
    if not gaps or max(gaps)[0] < STEP:
        return everyone
    near = max(gaps)[1]
    groups = [{d} for d in range(devices)]
    for (a, b), (_, cost) in costs.items():
        group, other = (next(g for g in groups if d in g) for d in (a, b))
        if cost <= near and group is not other:
            group |= other
            groups.remove(other)
    if len(groups) > MAX_SITES:
        return everyone
    return sorted(tuple(sorted(group)) for group in groups)


def _hull(ranges: list[Range]) -> Range:
    return (min((a for a, _ in ranges), default=0.0), max((b for _, b in ranges), default=0.0))
