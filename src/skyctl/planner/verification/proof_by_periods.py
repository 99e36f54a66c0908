"""Repeated layers: which ranges a device can take depends only on the kind of boundary it starts and ends at.

The boundaries inside the longest run of layers with period p are of p kinds (phases); every other boundary
is a kind of its own. A plan is then a choice of at most one edge (kind → kind) a device, with as many edges
out of each kind as into it (but the first and the last boundary), whose lengths add up to L. At a limit each
device has a longest range per edge. If no balanced choice of longest ranges adds up to L, no plan is below
the limit. Two proofs of that:

- prices: for any potential λ per kind, Σ over devices of max(0, max over edges of length − λ(from) + λ(to)),
  plus λ(first) − λ(last), is at least the largest sum (Lagrange; minimised by the ellipsoid method);
- exact: dynamic programming over the devices. State: the imbalance of every phase and which of the other
  kinds have been entered and left. A choice loses against the prices' sum; only states whose loss is at most
  that sum − L matter, which leaves few. After i of D devices a phase's imbalance is at most min(i, D − i).

Memory is taken with the least number in flight that any place has, so more choices are allowed than plans.
Where a choice is found, it is tried as a plan: edges in an Eulerian order, shortened by whole periods.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from skyctl.planner.verification import convex_solvers
from skyctl.planner.verification.boundary_walk import BoundaryEdge, plan_from
from skyctl.planner.verification.problem_data import Array, DeviceKind, Ints, ProblemData, Proof

MAX_PERIOD = 64
MAX_KINDS = 40
MAX_CELLS = 1e9
"""Device kinds × edges × evaluations of a potential."""
MAX_MOVES = 100_000_000
"""States × edges in one search, over all its steps: about ten seconds."""
BEAM = 2_000
"""States kept a step when a choice is looked for, before its absence is proved."""
BEAM_IMBALANCE = 4
SLACK = 1e-6
"""Layers; how much a loss may be off."""


@dataclass(frozen=True)
class Repeats:
    """Boundaries low … high are phases, boundary b of kind b mod p; ``kind``: per boundary its kind."""

    low: int
    high: int
    period: int
    kind: Ints
    kinds: int


@dataclass(frozen=True)
class DeviceEdges:
    """``longest[k, e]``: layers that a device of kind k can hold along edge e (−inf: none)."""

    sources: Ints
    targets: Ints
    longest: Array


def prove(facts: ProblemData, below_s: float) -> Proof:
    """Whether no plan's stages all take less than ``below_s``."""
    repeats = find_repeats(facts)
    if repeats is None:
        return Proof(None, "the layers do not repeat")
    edges = longest_ranges(facts, repeats, below_s)
    if not len(edges.sources):
        return Proof(True, "no device can hold any layer below it")
    count = np.array([len(kind.members) for kind in facts.kinds])
    most, potential = _price(facts, repeats, edges, count)
    if most < facts.layers - SLACK:
        return Proof(
            True,
            f"below it, {facts.devices} devices hold {most:.6g} of {facts.layers} layers at most "
            f"(repeated layers, prices)",
        )
    choices = _Choices(facts, repeats, edges, potential)
    slack = most - facts.layers + SLACK
    chosen = choices.best(slack, width=BEAM) or choices.best(slack)
    if chosen is None:
        return Proof(None, "too many ways to share out the repeated layers")
    if not chosen:
        return Proof(
            True, f"no choice of ranges holds all {facts.layers} layers below it (repeated layers, exact)"
        )
    if plan_from(facts, repeats.period, chosen, below_s) is not None:
        return Proof(False, "a plan below the bound exists (repeated layers)")
    return Proof(None, "ranges that would hold all layers exist, but make no plan as found")


def find_repeats(facts: ProblemData) -> Repeats | None:
    """The run and period that leave the fewest kinds of boundaries; None where nothing repeats enough."""
    problem = facts.problem
    columns = [facts.seconds(kind.device) for kind in facts.kinds if _measured(facts, kind)]
    if len(columns) < len(facts.kinds):
        columns.append(np.array([layer.flops for layer in problem.layers]))
    if facts.limited:
        columns += [np.diff(facts.state), np.diff(facts.activation), facts.workspace]
        columns[-3:-1] = [
            np.array([layer.state_bytes for layer in problem.layers]),
            np.array([layer.activation_bytes for layer in problem.layers]),
        ]
    if facts.windowed:
        columns.append(np.array([layer.output_bytes for layer in problem.layers]))
    _, same = np.unique(np.array(columns), axis=1, return_inverse=True)
    same = same.reshape(-1)
    best: tuple[int, int, int, int] | None = None
    for period in range(1, min(MAX_PERIOD, facts.layers // 2) + 1):
        start, length = _longest_run(same[period:] == same[:-period])
        stop = start + length + period
        if length < period:
            continue
        low = max(1, start + (1 if facts.windowed else 0))
        high = min(stop, facts.layers - 1)
        kinds = period + facts.layers + 1 - (high - low + 1)
        if high - low >= period and (best is None or kinds < best[0]):
            best = (kinds, low, high, period)
    if best is None or best[0] > MAX_KINDS:
        return None
    _, low, high, period = best
    kind = np.empty(facts.layers + 1, dtype=np.int64)
    inside = np.arange(low, high + 1)
    kind[inside] = inside % period
    outside = np.setdiff1d(np.arange(facts.layers + 1), inside)
    kind[outside] = period + np.arange(len(outside))
    return Repeats(low, high, period, kind, period + len(outside))


def _measured(facts: ProblemData, kind: DeviceKind) -> bool:
    return facts.problem.devices[kind.device].id in facts.problem.times


def _longest_run(same: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> tuple[int, int]:
    """(start, length) of the longest run of True."""
    steps = np.diff(np.concatenate(([0], same.astype(np.int8), [0])))
    starts, ends = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
    if not len(starts):
        return 0, 0
    at = int(np.argmax(ends - starts))
    return int(starts[at]), int(ends[at] - starts[at])


def longest_ranges(facts: ProblemData, repeats: Repeats, below_s: float) -> DeviceEdges:
    """Every edge that some device can take.

    From a phase, ranges are measured at the phase's first boundary in the run: later ones have less room
    before its end. To a boundary behind the run they are measured from each start, least first.
    """
    n = repeats.kinds
    longest = np.full((len(facts.kinds), n, n), -np.inf)
    inside = np.arange(repeats.low, repeats.high + 1)
    firsts = inside[: repeats.period]
    behind = np.arange(repeats.high + 1, facts.layers + 1)
    before = np.arange(0, repeats.low)
    in_flight = facts.least_in_flight(1)
    for k, device in enumerate(facts.kinds):
        work = facts.work(device.device)
        rows = longest[k]
        for start in (*before, *firsts, *behind[:-1]):
            stops = np.flatnonzero(facts.stops(device, int(start), in_flight, below_s, work))
            if start in firsts:
                stops = stops[stops <= repeats.high]
            np.maximum.at(rows[repeats.kind[start]], repeats.kind[stops], stops - start)
        for stop in behind:
            starts = np.flatnonzero(facts.starts(device, int(stop), in_flight, below_s, work))
            starts = starts[(starts >= repeats.low) & (starts <= repeats.high)]
            np.maximum.at(rows[:, repeats.kind[stop]], repeats.kind[starts], stop - starts)
    sources, targets = np.nonzero((longest > 0).any(axis=0))
    return DeviceEdges(sources, targets, longest[:, sources, targets])


def _price(facts: ProblemData, repeats: Repeats, edges: DeviceEdges, count: Ints) -> tuple[float, Array]:
    """(the least upper bound found on the layers held, its potentials; the last boundary's is 0)."""
    n = repeats.kinds
    first, last = int(repeats.kind[0]), int(repeats.kind[-1])
    at = np.array([v for v in range(n) if v != last])
    rows = np.arange(len(count))

    def held(free: Array) -> tuple[float, Array]:
        potential = np.zeros(n)
        potential[at] = free
        gain = edges.longest + (potential[edges.targets] - potential[edges.sources])
        pick = gain.argmax(axis=1)
        most = gain[rows, pick]
        use = np.where(most > 0, count, 0)
        slope = np.bincount(edges.targets[pick], use, n) - np.bincount(edges.sources[pick], use, n)
        slope[first] += 1
        return float(use @ np.maximum(most, 0.0) + potential[first]), slope[at]

    radius = 2 * float(edges.longest.max()) * n**0.5
    steps = int(min(20_000, MAX_CELLS / edges.longest.size))
    value, free = convex_solvers.minimise(
        held, np.zeros(n - 1), radius, facts.layers - 2 * SLACK, steps=steps
    )
    potential = np.zeros(n)
    potential[at] = free
    return value, potential


class _Choices:
    """The dynamic programming over devices."""

    def __init__(self, facts: ProblemData, repeats: Repeats, edges: DeviceEdges, potential: Array) -> None:
        self.facts = facts
        self.edges = edges
        self.potential = potential
        self.period = repeats.period
        self.first, self.last = int(repeats.kind[0]), int(repeats.kind[-1])
        self.half = facts.devices // 2 + 1
        self.phases = [*range(1, repeats.period)]  # the imbalances of all kinds add up to 0
        radix = 2 * self.half + 1
        self.stride_out: dict[int, int] = {v: radix**i for i, v in enumerate(self.phases)}
        self.stride_in: dict[int, int] = {}
        size = radix ** len(self.phases)
        self.centre = sum(self.half * stride for stride in self.stride_out.values())
        for v in range(repeats.period, repeats.kinds):
            for table, never in ((self.stride_out, self.last), (self.stride_in, self.first)):
                if v != never:
                    table[v] = size
                    size *= 2
        self.size = size

    def best(self, allowance: float, width: int | None = None) -> list[BoundaryEdge] | None:
        """A balanced choice that loses at most ``allowance`` layers against the prices; empty: there is none;
        None: too many states. ``width``: keep only so many states a step; empty then proves nothing."""
        if self.size >= 2**62:
            return None
        visited = 0
        turns = [(k, d) for k, kind in enumerate(self.facts.kinds) for d in kind.members]
        states, losses = np.array([self.centre]), np.array([0.0])
        steps = [(states, losses)]
        tables = [self._moves(k, allowance) for k in range(len(self.facts.kinds))]
        turns.sort(key=lambda turn: len(tables[turn[0]]))
        for i, (k, _) in enumerate(turns):
            visited += len(states) * len(tables[k])
            if visited > MAX_MOVES:
                return None
            states, losses = self._step(tables[k], states, losses, allowance)
            most = min(i + 1, len(turns) - i - 1)
            keep = self._balanced(states, most if width is None else min(most, BEAM_IMBALANCE))
            states, losses = states[keep], losses[keep]
            if width is not None and len(states) > width:
                keep = np.sort(np.argpartition(losses, width)[:width])
                states, losses = states[keep], losses[keep]
            if not len(states):
                return []
            steps.append((states, losses))
        final = [s for s in range(len(states)) if self._whole(int(states[s]))]
        if not final:
            return []
        return self._trace(steps, turns, tables, int(states[min(final, key=lambda s: losses[s])]))

    def _moves(self, k: int, allowance: float) -> list[tuple[float, int, int]]:
        """(loss, edge or −1 for none, the state's change) of a device of kind k."""
        edges = self.edges
        gain = edges.longest[k] + self.potential[edges.targets] - self.potential[edges.sources]
        top = max(0.0, float(gain.max()))
        out = [(top, -1, 0)] if top <= allowance else []
        for e in np.flatnonzero(top - gain <= allowance).tolist():
            source, target = int(edges.sources[e]), int(edges.targets[e])
            out.append((top - float(gain[e]), e, self._change(source, target)))
        return out

    def _change(self, source: int, target: int) -> int:
        entering = -self.stride_out.get(target, 0) if target < self.period else self.stride_in[target]
        return self.stride_out.get(source, 0) + entering

    def _step(
        self, moves: list[tuple[float, int, int]], states: Ints, losses: Array, allowance: float
    ) -> tuple[Ints, Array]:
        found: list[Ints] = []
        cost: list[Array] = []
        for loss, e, change in moves:
            ok = losses + loss <= allowance
            if e >= 0:
                ok &= self._unused(states, e)
            found.append(states[ok] + change)
            cost.append(losses[ok] + loss)
        if not found:
            return np.empty(0, dtype=np.int64), np.empty(0)
        every, costs = np.concatenate(found), np.concatenate(cost)
        order = np.argsort(every, kind="stable")
        every, costs = every[order], costs[order]
        if not len(every):
            return every, costs
        at = np.flatnonzero(np.concatenate(([True], every[1:] != every[:-1])))
        return every[at], np.minimum.reduceat(costs, at)

    def _unused(self, states: Ints, e: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Where a boundary outside the run has not been left, or entered, before."""
        out = np.ones(len(states), dtype=bool)
        for v, table in ((self.edges.sources[e], self.stride_out), (self.edges.targets[e], self.stride_in)):
            if v >= self.period:
                out &= states // table[int(v)] % 2 == 0
        return out

    def _balanced(self, states: Ints, most: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        out = np.ones(len(states), dtype=bool)
        radix = 2 * self.half + 1
        for v in self.phases:
            out &= np.abs(states // self.stride_out[v] % radix - self.half) <= most
        return out

    def _whole(self, state: int) -> bool:
        """Every phase balanced; every other boundary left as often as entered; the first left, the last
        entered."""
        radix = 2 * self.half + 1
        if any(state // self.stride_out[v] % radix != self.half for v in self.phases):
            return False
        left = {v: state // s % 2 for v, s in self.stride_out.items() if v >= self.period}
        entered = {v: state // s % 2 for v, s in self.stride_in.items()}
        return all(
            left.get(v, 1) == entered.get(v, 1) if v not in (self.first, self.last) else True
            for v in {*left, *entered}
        ) and bool(left[self.first] and entered[self.last])

    def _trace(
        self,
        steps: list[tuple[Ints, Array]],
        turns: list[tuple[int, int]],
        tables: list[list[tuple[float, int, int]]],
        state: int,
    ) -> list[BoundaryEdge]:
        """The edges that led to a state, backwards."""
        out: list[BoundaryEdge] = []
        for i in range(len(turns) - 1, -1, -1):
            k, device = turns[i]
            states, losses = steps[i + 1]
            want = losses[np.searchsorted(states, state)]
            states, losses = steps[i]
            for loss, e, change in tables[k]:
                at = int(np.searchsorted(states, state - change))
                if at == len(states) or states[at] != state - change or losses[at] + loss > want + 1e-12:
                    continue
                if e >= 0 and not self._unused(states[at : at + 1], e)[0]:
                    continue
                if e >= 0:
                    source, target = int(self.edges.sources[e]), int(self.edges.targets[e])
                    out.append(BoundaryEdge(device, source, target, int(self.edges.longest[k, e])))
                state -= change
                break
        return out
