"""Is there a plan whose step takes less than a limit? Every plan that paths do not rule out is simulated.

Tables, for every set of devices, device d of it and layer q: when exactly these devices hold [q, L) and d is
the first of them, the least seconds over all their orders and cuts
- ``trip``: of one microbatch from the start of its forward on d to the end of its backward there;
- ``span``: from the start of d's first forward to the end of its last backward.
Both are made from the last stage on, from what every play of a schedule has to wait for (``_least_span``). A
depth-first search then places stages from the first one on, and leaves a branch where the stages placed,
with the tables for the rest, make a path as long as the limit. Shared resources count as one more limit on
a message. For eager 1F1B, whose depth is the plan's choice, the paths allow any depth. If stages may
recompute, one does where it does not fit otherwise. If messages queue for what they share, a step may become
shorter when a stage that need not recompute does: then the proof simulates all choices.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from skyctl.planner.verification.problem_data import Array, Bools, ProblemData, Proof, sums
from skyctl.schedule.actions import EAGER
from skyctl.schedule.simulation import simulate
from skyctl.schedule.step_times import BoundaryTimes, MessageTimes, StageTimes

MAX_TABLE_CELLS = 1.2e8
MAX_STEPS = 100_000
"""Places of a next stage looked at: about ten seconds."""
MAX_PLANS = 15_000
INF = float("inf")


class PathStage(NamedTuple):
    """Layers [start, stop) on a device."""

    device: int
    start: int
    stop: int


class _TooManyError(Exception):
    pass


def prove(facts: ProblemData, below_s: float) -> Proof:
    """Whether no plan's step takes less than ``below_s``."""
    n = facts.devices
    if n > 10 or table_cells(facts) > MAX_TABLE_CELLS:
        return Proof(None, f"{n} devices × {facts.layers} layers are too many for the paths' tables")
    search = _Search(facts, below_s)
    try:
        better = search.run()
    except _TooManyError:
        return Proof(None, "too many plans that paths do not rule out")
    if better is not None:
        return Proof(False, f"a plan of {better:.6g} s exists")
    return Proof(True, f"{search.plans} plans simulated, all others ruled out by paths through them")


def table_cells(facts: ProblemData) -> float:
    """How many numbers one number of microbatches' tables are made from."""
    n = facts.devices
    return n * max(1, n - 1) * 2.0 ** max(0, n - 2) * float(facts.layers) ** 2


def _least_span(m: int, in_flight: int, forward: Array, backward: Array, beyond: Array) -> Array:
    """A stage's least seconds from its first forward to its last backward, with k = ``in_flight`` forwards
    before the first backward, where a microbatch spends ``beyond`` between its forward's end and the start
    of its backward here.

    Its own work, and what it idles before the first backward (k forwards are done by then) and after the
    last forward (k − 1 backwards follow before the last one's); or, as forward i + k waits for backward i,
    turn after turn of forward, beyond, backward.
    """
    idle_first = np.maximum(0.0, beyond - (in_flight - 1) * forward)
    if m > in_flight:
        idle_last = np.maximum(0.0, beyond - (in_flight - 1) * backward)
        span = m * (forward + backward) + idle_first + idle_last
    else:
        span = m * forward + np.maximum(m * backward + idle_first, backward + beyond)
    turns = -(-m // in_flight)
    after = m - 1 - (turns - 1) * in_flight
    out: Array = np.maximum(span, turns * (forward + beyond + backward) + after * backward)
    return out


class PathTables:
    """``span`` and ``trip`` by (set of devices as bits, d), over the layers q; infinite: it does not fit."""

    def __init__(self, facts: ProblemData, below_s: float) -> None:
        """Stages whose work alone takes ``below_s`` seconds or more count as not fitting."""
        self.facts = facts
        self.problem = facts.problem
        self.below_s = below_s * (1 - 1e-12)
        self.m = facts.microbatches
        self.columns = [facts.columns(d) for d in range(facts.devices)]
        tables = [[_between(sums(column)) for column in columns] for columns in self.columns]
        self.forward = [t[0] + facts.overhead_table(d) for d, t in enumerate(tables)]
        self.backward = [t[1] + facts.overhead_table(d) for d, t in enumerate(tables)]
        self.optimizer = [t[2] for t in tables]
        self._links = {(link.source, link.target): link for link in self.problem.links}
        n = facts.devices
        self.ways = {(a, b): self._way(a, b) for a in range(n) for b in range(n) if a != b}
        self._bars: dict[tuple[int, int], Array] = {}
        self.strict, self.frugal = facts.separate() if facts.loose else (facts, facts)
        self._fitting: dict[tuple[ProblemData, int, int], Bools] = {}
        self._slower: dict[tuple[int, int], Array] = {}
        self.span: dict[tuple[int, int], Array] = {}
        self.trip: dict[tuple[int, int], Array] = {}
        for chosen in sorted(range(1, 1 << n), key=int.bit_count):
            if chosen.bit_count() <= facts.most_stages:
                for d in range(n):
                    if chosen >> d & 1:
                        self._tail(chosen, d)

    def in_flight(self, stages: int) -> int:
        """The number in flight that the paths may assume for a stage with that many to the end."""
        return self.m if self.problem.schedule == EAGER else self.facts.least_in_flight(stages)

    def barred(self, device: int, stages: int) -> Array:
        """[start, stop] → 0 where that stage fits, infinity elsewhere."""
        key = (device, self.facts.least_in_flight(stages))
        if key not in self._bars:
            fits = self._fits(self.strict, *key)
            if self.facts.loose:
                fits = fits | self._fits(self.frugal, *key)
            self._bars[key] = np.where(fits, 0.0, INF)
        return self._bars[key]

    def backwards(self, device: int, stages: int) -> Array:
        """[start, stop] → seconds of a backward, with another forward where the stage must recompute."""
        if not self.facts.loose:
            return self.backward[device]
        key = (device, self.facts.least_in_flight(stages))
        if key not in self._slower:
            again = self.forward[device] - self.facts.overhead_table(device)
            more = np.where(self._fits(self.strict, *key), 0.0, again)
            self._slower[key] = self.backward[device] + more
        return self._slower[key]

    def _fits(self, facts: ProblemData, device: int, in_flight: int) -> Bools:
        key = (facts, device, in_flight)
        if key not in self._fitting:
            self._fitting[key] = self._fits_anew(*key)
        return self._fitting[key]

    def _fits_anew(self, facts: ProblemData, device: int, in_flight: int) -> Bools:
        kind = next(kind for kind in facts.kinds if device in kind.members)
        anywhere = kind._replace(may_be_first=True, may_be_last=True)
        work = facts.work(device)
        most = self.below_s / self.m
        fits = [facts.stops(anywhere, q, in_flight, most, work) for q in range(facts.layers)]
        return np.array([*fits, np.zeros(facts.layers + 1, dtype=bool)])

    def _hop(self, a: int, b: int, boundary: int) -> MessageTimes:
        size = self.problem.layers[boundary - 1].output_bytes
        ends = (self.problem.devices[a].id, self.problem.devices[b].id)
        link = self._links.get(ends)
        size *= 1.0 if link is None else link.sent_share
        shared = tuple(
            (number, size / resource.bandwidth_bytes_per_s)
            for number, resource in enumerate(self.problem.shared)
            if any(tuple(pair) == ends for pair in resource.links)
        )
        if link is None:
            return MessageTimes(shared=shared)
        return MessageTimes(size / link.bandwidth_bytes_per_s, link.latency_s, shared)

    def _way(self, a: int, b: int) -> tuple[Array, Array]:
        """Per boundary: seconds of a message there and of one back with both latencies; and what m − 1 more
        of them add at least."""
        both, more = np.zeros(self.facts.layers + 1), np.zeros(self.facts.layers + 1)
        for boundary in range(1, self.facts.layers):
            for hop in (self._hop(a, b, boundary), self._hop(b, a, boundary)):
                busy = max(hop.link_s, *(seconds for _, seconds in hop.shared), 0.0)
                both[boundary] += busy + hop.latency_s
                more[boundary] = max(more[boundary], (self.m - 1) * busy)
        return both, more

    def _tail(self, chosen: int, d: int) -> None:
        stages = chosen.bit_count()
        layers, barred = self.facts.layers, self.barred(d, stages)
        f, b = self.forward[d], self.backwards(d, stages)
        if stages == 1:
            bar = barred[:, layers] if self.facts.may_be_last(d) else np.full(layers + 1, INF)
            alone = np.zeros(layers + 1)
            self.trip[chosen, d] = f[:, layers] + b[:, layers] + bar
            self.span[chosen, d] = (
                _least_span(self.m, self.in_flight(1), f[:, layers], b[:, layers], alone) + bar
            )
            return
        rest = chosen ^ (1 << d)
        trips, spans = np.full(layers + 1, INF), np.full(layers + 1, INF)
        for e in range(self.facts.devices):
            if rest >> e & 1:
                beyond, after = self._beyond(d, e, self.span[rest, e], self.trip[rest, e])
                with np.errstate(invalid="ignore"):
                    own = _least_span(self.m, self.in_flight(stages), f, b, beyond[None, :])
                    span = np.maximum(own, f + b + after[None, :]) + barred
                trips = np.minimum(trips, (f + b + beyond[None, :] + barred).min(axis=1))
                spans = np.minimum(spans, span.min(axis=1))
        self.trip[chosen, d], self.span[chosen, d] = trips, spans

    def _beyond(self, d: int, e: int, span: Array, trip: Array) -> tuple[Array, Array]:
        """Per boundary from d to e, with what e and the rest need: (one microbatch beyond d, what a first
        forward and a last backward of d have at least between them)."""
        both, more = self.ways[d, e]
        return both + trip, both + np.maximum(span, more + trip)


class _Search(PathTables):
    """The search through the tables."""

    def __init__(self, facts: ProblemData, below_s: float) -> None:
        super().__init__(facts, below_s)
        self.plans = 0
        self.steps = 0

    def run(self) -> float | None:
        """A better plan's seconds, or None: there is none."""
        twins = self._twins()
        for chosen in range(1, 1 << self.facts.devices):
            if chosen.bit_count() > self.facts.most_stages:
                continue
            if any(chosen >> d & 1 and not chosen >> c & 1 for c, d in twins):
                continue  # the same with the lower twin
            for d in range(self.facts.devices):
                if chosen >> d & 1 and self.facts.may_be_first(d) and self.span[chosen, d][0] < self.below_s:
                    better_s = self._extend((), d, 0, chosen)
                    if better_s is not None:
                        return better_s
        return None

    def _twins(self) -> list[tuple[int, int]]:
        """Devices that may be exchanged: of one kind, and without any link in the problem."""
        if self.problem.links or self.problem.shared:
            return []
        same = [kind.members for kind in self.facts.kinds]
        return [
            (a, b)
            for members in same
            for a, b in itertools.pairwise(members)
            if np.array_equal(self.columns[a], self.columns[b])
            and np.array_equal(self.facts.overhead_table(a), self.facts.overhead_table(b))
        ]

    def _extend(self, placed: tuple[PathStage, ...], d: int, start: int, chosen: int) -> float | None:
        """Stages ``placed``; d's begins at ``start``, and exactly ``chosen`` hold what is left."""
        facts = self.facts
        rest, stages = chosen ^ (1 << d), chosen.bit_count()
        if not rest:
            return self._play((*placed, PathStage(d, start, facts.layers)))
        stops = slice(start + 1, facts.layers - stages + 2)
        f, b = self.forward[d][start, stops], self.backwards(d, stages)[start, stops]
        o, bar = self.optimizer[d][start, stops], self.barred(d, stages)[start, stops]
        for e in range(facts.devices):
            if not rest >> e & 1:
                continue
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise _TooManyError
            beyond, after = self._beyond(d, e, self.span[rest, e], self.trip[rest, e])
            beyond, after = beyond[stops], after[stops]
            span = np.maximum(_least_span(self.m, self.in_flight(stages), f, b, beyond), f + b + after)
            least = self._through(placed, d, stages, (span, f + b + beyond, o)) + bar
            for i in np.flatnonzero(least < self.below_s).tolist():
                stop = start + 1 + i
                better_s = self._extend((*placed, PathStage(d, start, stop)), e, stop, rest)
                if better_s is not None:
                    return better_s
        return None

    def _through(
        self, placed: tuple[PathStage, ...], d: int, stages: int, tail: tuple[Array, Array, Array]
    ) -> Array:
        """The least step with these stages before d's, for d's (span, trip, optimizer)."""
        span, trip, optimizer = tail
        reached = [0.0]  # when each stage can start at the earliest
        for s, (a, p, q) in enumerate(placed):
            following = placed[s + 1].device if s + 1 < len(placed) else d
            hop = self._hop(a, following, q)
            busy = max(hop.link_s, *(seconds for _, seconds in hop.shared), 0.0)
            reached.append(reached[-1] + float(self.forward[a][p, q]) + busy + hop.latency_s)
        out: Array = reached[-1] + span + optimizer
        following = d
        for s in range(len(placed) - 1, -1, -1):
            a, p, q = placed[s]
            both, more = (float(x[q]) for x in self.ways[a, following])
            f, b = self.forward[a][p, q], self.backwards(a, stages + len(placed) - s)[p, q]
            after = both + np.maximum(span, more + trip)
            beyond = both + trip
            own = _least_span(self.m, self.in_flight(stages + len(placed) - s), f, b, beyond)
            span, trip = np.maximum(own, f + b + after), f + b + beyond
            out = np.maximum(out, reached[s] + span + self.optimizer[a][p, q])
            following = a
        return out

    def _play(self, plan: tuple[PathStage, ...]) -> float | None:
        if self._through(plan[:-1], plan[-1].device, 1, self._last(plan[-1])) >= self.below_s:
            return None
        self.plans += 1
        if self.problem.schedule == EAGER:
            raise _TooManyError  # depths are a decision too, and not enumerated here
        count = len(plan)
        stages = [
            StageTimes(
                float(self.columns[d][0][p:q].sum()) + self.facts.stage_overhead_s(d, p, q),
                float(self.backwards(d, count - s)[p, q]),
                float(self.columns[d][2][p:q].sum()),
            )
            for s, (d, p, q) in enumerate(plan)
        ]
        boundaries = [
            BoundaryTimes(self._hop(a.device, b.device, a.stop), self._hop(b.device, a.device, a.stop))
            for a, b in itertools.pairwise(plan)
        ]
        in_flight = [self.facts.least_in_flight(count - s) for s in range(count)]
        for times in self._recomputing(plan, stages, boundaries):
            self.plans += 1
            if self.plans > MAX_PLANS:
                raise _TooManyError
            step = simulate(self.problem.schedule, self.m, in_flight, times, boundaries)
            if step.iteration_s < self.below_s:
                return step.iteration_s
        return None

    def _recomputing(
        self, plan: tuple[PathStage, ...], stages: list[StageTimes], boundaries: list[BoundaryTimes]
    ) -> Iterator[list[StageTimes]]:
        """The stages as they are, then with some that recompute without having to, where that may pay.

        More work can shorten a step only where it changes who goes first: where messages over two boundaries,
        or both ways over one, pass the same resource.
        """
        ways = [way for boundary in boundaries for way in (boundary.forward, boundary.backward)]
        passed = Counter(resource for way in ways for resource, _ in way.shared)
        if not self.facts.loose or max(passed.values(), default=0) < 2:
            yield stages
            return
        choices = []
        for s, (stage, times) in enumerate(zip(plan, stages, strict=True)):
            again = float(self.columns[stage.device][0][stage.start : stage.stop].sum())
            slower = replace(times, backward_s=times.backward_s + again)
            busy_s = self.m * (slower.forward_s + slower.backward_s) + slower.optimizer_s
            may = self._has_choice(stage, len(plan) - s) and busy_s < self.below_s
            choices.append((times, slower) if may else (times,))
        yield from map(list, itertools.product(*choices))

    def _has_choice(self, stage: PathStage, stages: int) -> bool:
        """Whether the stage fits either way."""
        at = (stage.start, stage.stop)
        key = (stage.device, self.facts.least_in_flight(stages))
        return all(bool(self._fits(facts, *key)[at]) for facts in (self.strict, self.frugal))

    def _last(self, stage: PathStage) -> tuple[Array, Array, Array]:
        d, p, q = stage
        f, b = self.forward[d][p, q : q + 1], self.backwards(d, 1)[p, q : q + 1]
        span = _least_span(self.m, self.in_flight(1), f, b, np.zeros(1))
        return span, f + b, self.optimizer[d][p, q : q + 1]


def _between(prefix: Array) -> Array:
    """[start, stop] → the sum of [start, stop); below the diagonal it means nothing."""
    out: Array = np.maximum(0.0, prefix[None, :] - prefix[:, None])
    return out
