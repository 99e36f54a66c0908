"""Lower bound on a step for many devices: what one microbatch's whole trip leaves for every stage.

Let P be the trip of one microbatch through all stages and back, of which stage s takes [u_s, v_s], way
there and back counted together; t_s = v_s − u_s its forward and backward, k_s its microbatches in flight, M
their number. Paths through the play give, for every plan with step Z:

- Z ≥ u_s + M t_s: all work of a stage, and fill and drain before it;
- Z ≥ v_e + (M − 1) f_s + ((M − k_s)⁺ + k_e − 1) b_s: it works through all forwards, the last one turns at
  stage e, and its last backwards follow; and the same the other way round, f and b exchanged;
- Z ≥ u_s + begin + middle + end, for M > k_s: to the first backward's end on s by way of stage a, whose turn
  comes with the k_a-th forward: v_a − u_s + (k_a − 1) f_s; from there to the last forward's start in turns
  out to stage e and back, each worth k_s − k_e + 1 microbatches and v_e − u_s seconds; to the last
  backward's end by way of a stage b: v_b − u_s + (k_b − 1) b_s.

For a given Z, P and number of stages these bound every u_s, v_s and t_s, by induction along the pipeline
there and back, and Σ t_s = P − links. A device holds no more within t_s than whole layers allow. If no
choice of devices holds the whole model so, the step is longer than Z. All P (in intervals) and all shapes of
plans (``pipeline_shapes.py``) are gone through: those of a number of stages as one set first, whatever their
crossings between clusters; then sets are divided where they are not refuted. The largest Z refuted is the
bound; what the first pass refutes holds, however little time there is for the second.

The turns are why a slow link costs 1F1B so much: the two stages next to it have one more microbatch in flight
between them for the whole way there and back, so t_s + t_{s+1} + link ≤ 2 · period.
"""

from __future__ import annotations

import math
import time

import numpy as np
import numpy.typing as npt

from skyctl.planner.cost_model import Array, CostModel
from skyctl.planner.iteration.pipeline_shapes import PipelineShape, PipelineShapes, ShapeSet
from skyctl.planner.iteration.round_trip_tables import MARGIN, DeviceCapacity, LinkClusters, cluster_devices

Flags = npt.NDArray[np.bool_]
Whole = npt.NDArray[np.int64]

FIRST = 24
"""Intervals of P to begin with; those not refuted are split."""
SPLITS = 4
SWEEPS = 2
KEPT = 64
MAX_SIZE = 1_000_000
"""Devices × layers, and a quarter of the pairs of devices: beyond, no tables are made."""
PRECISION = 1e-5


def round_trip_bound_fits(model: CostModel) -> bool:
    """Whether the bound's tables are small enough for the problem."""
    return max(model.devices * model.layers, 4 * model.devices**2) <= MAX_SIZE


class RoundTripBound:
    """Refutes step times; one object per problem."""

    def __init__(self, model: CostModel, most_s: float, deadline: float = math.inf) -> None:
        """A bound that is sought until the deadline, in seconds of ``time.perf_counter``.

        Args:
            most_s: the longest step in seconds that will be asked about.
        """
        self.model = model
        self.m = model.microbatches
        self.deadline = deadline
        self.clusters: LinkClusters = cluster_devices(model)
        self.shapes = PipelineShapes(self.clusters, model.max_stages, self._keep_deadline)
        self.capacity = DeviceCapacity(model, most_s / self.m, self._keep_deadline)
        self._known_caps: dict[object, tuple[Array, Flags]] = {}
        self._known_turns: dict[tuple[int, ...], tuple[Whole, Whole]] = {}

    def _keep_deadline(self) -> None:
        if time.perf_counter() > self.deadline:
            raise TimeoutError

    def largest(self, low_s: float, high_s: float) -> float:
        """The largest step refuted, between a bound known otherwise and a plan's value.

        Out of time: the largest that was refuted with each number of stages as one set, or ``low_s``.
        """
        known_s = low_s
        if self.capacity.usable:
            try:
                known_s = self._largest_of_all(low_s, high_s, divides=False)
                known_s = self._largest_of_all(known_s, high_s, divides=True)
            except TimeoutError:
                pass
        return known_s

    def _largest_of_all(self, low_s: float, high_s: float, *, divides: bool) -> float:
        """One pass: shapes that are not refuted at the present limit lower it to what is refuted of them;
        those before them stay refuted."""
        for whole in self.shapes.by_stages():
            high_s = self._largest_of_set(whole, low_s, high_s, divides=divides)
        return high_s

    def _largest_of_set(self, whole: ShapeSet, low_s: float, high_s: float, *, divides: bool) -> float:
        shape = self.shapes.relaxed(whole)
        if high_s <= low_s or self.refutes(shape, high_s):
            return high_s
        if divides and whole.least < whole.most:
            for half in self.shapes.halves(whole):
                high_s = self._largest_of_set(half, low_s, high_s, divides=True)
            return high_s
        ordered = self.shapes.ordered(whole) if divides else None
        for each in [shape] if ordered is None else ordered:
            if high_s > low_s and not self.refutes(each, high_s):
                high_s = self._largest_of(each, low_s, high_s)
        return high_s

    def _largest_of(self, shape: PipelineShape, low_s: float, high_s: float) -> float:
        if not self.refutes(shape, low_s):
            return low_s
        while high_s - low_s > PRECISION * high_s:
            middle = (low_s + high_s) / 2
            if self.refutes(shape, middle):
                low_s = middle
            else:
                high_s = middle
        return low_s

    def refutes(self, shape: PipelineShape, step_s: float) -> bool:
        """Whether it is proved that no plan of that shape takes ``step_s`` or less.

        Raises:
            TimeoutError: undecided at the deadline.
        """
        self._keep_deadline()
        if not self._large_enough(shape, step_s / self.m):
            return True
        # the first stage waits for a whole trip before its first backward and after its last forward
        longest = (
            step_s / 2
            if self.m > self.model.least_in_flight(0, shape.stages) and not self.model.chooses_depth
            else step_s
        )
        shortest = shape.least_s + self.capacity.shortest
        if shortest > longest:
            return True
        edges = np.linspace(shortest, longest, FIRST + 1)
        starts, stops = edges[:-1], edges[1:]
        for _ in range(SPLITS):
            open_ = self._not_refuted(shape, step_s, starts, stops)
            starts, stops = starts[open_], stops[open_]
            if not len(starts):
                return True
            middles = (starts + stops) / 2
            starts, stops = np.concatenate([starts, middles]), np.concatenate([middles, stops])
        return not self._not_refuted(shape, step_s, starts, stops).any()

    def _large_enough(self, shape: PipelineShape, cap_s: float) -> bool:
        """Whether each cluster's best devices could hold the model, were there only their work to count."""
        held = 0.0
        sizes: dict[int, int] = {}
        for g, size in shape.segments or ((-1, shape.stages),):
            sizes[g] = sizes.get(g, 0) + size
        for g, size in sizes.items():
            devices = range(self.model.devices) if g < 0 else self.clusters.members[g]
            held += sum(sorted((self.capacity.most(d, cap_s) for d in devices), reverse=True)[:size])
        return held >= 1 - MARGIN

    def _not_refuted(self, shape: PipelineShape, step_s: float, starts: Array, stops: Array) -> Flags:
        """By interval of P, whether it is not refuted."""
        caps, ok = self._caps_again(shape, step_s, starts, stops)
        if not ok.any():
            return ok
        budget = stops[ok] - shape.least_s
        at = 0
        groups: dict[int, tuple[int, Array, int]] = {}  # cluster → stages, cap, least in flight
        for g, size in shape.segments or ((-1, shape.stages),):
            cap = caps[at : at + size, :][:, ok].max(axis=0)
            at += size
            count, most, least = groups.get(g, (0, cap, self.m))
            in_flight = min(least, self._flying(shape.stages - at, shape.stages))
            groups[g] = (count + size, np.maximum(cap, most), in_flight)
        out = ok.copy()
        out[ok] = self._holds(groups, budget)
        return out

    def _flying(self, after: int, stages: int) -> int:
        """In flight of the last stage of a segment with ``after`` stages after it: the least in it."""
        return self.model.least_in_flight(stages - after - 1, stages)

    def _caps_again(
        self, shape: PipelineShape, step_s: float, starts: Array, stops: Array
    ) -> tuple[Array, Flags]:
        key = (shape.links, shape.room, step_s, starts.tobytes())
        if key not in self._known_caps:
            if len(self._known_caps) > KEPT:
                self._known_caps.clear()
            self._known_caps[key] = self._caps(shape, step_s, starts, stops)
        return self._known_caps[key]

    def _caps(self, shape: PipelineShape, step_s: float, starts: Array, stops: Array) -> tuple[Array, Flags]:
        """(most seconds of each stage (stages, intervals), whether the interval is not refuted so far).

        u_s and v_s are where stage s begins and ends in the trip; each is kept between two numbers.
        """
        m, stages = self.m, shape.stages
        numbers = [
            m if self.model.chooses_depth else self.model.least_in_flight(s, stages) for s in range(stages)
        ]
        least = [self.model.least_in_flight(s, stages) for s in range(stages)]
        turns, rest = self._turns(numbers)
        lows = np.array([low for low, _ in shape.links] + [0.0])
        highs = [high for _, high in shape.links] + [0.0]
        before, after, most_after = shape.room
        begins = np.concatenate([[0.0], np.cumsum(lows[:-1])])  # links before each stage
        width = len(starts)
        slack = step_s - 2 * starts
        low_u, low_v = np.zeros((stages, width)), np.zeros((stages, width))
        high_u, high_v = np.full((stages, width), np.inf), np.full((stages, width), np.inf)
        high_u[0] = 0.0
        low_v[-1] = starts
        caps = np.zeros((stages, width))
        ok: Flags = np.ones(width, dtype=bool)
        for _ in range(SWEEPS):
            for s, k in enumerate(numbers):
                cap = (step_s - low_u[s]) / m
                cap = np.minimum(cap, self._rounds(step_s, low_v[s:], k, least[s:]))
                if m > k:
                    cap = np.minimum(cap, self._ends(step_s + high_u[s], low_v[s:], numbers[s:]))
                end = np.minimum(high_u[s] + cap, stops - after[s])
                window = turns[: s + 1, s] > 0
                if window.any():
                    from_u = high_u[: s + 1][window]
                    left = np.maximum(rest[: s + 1, s][window] - 1, 0)
                    idle = (begins[np.flatnonzero(window) + left] - begins[: s + 1][window])[:, None]
                    room = slack + from_u - idle
                    ok &= (room >= 0).all(axis=0)
                    end = np.minimum(end, (from_u + room / turns[: s + 1, s][window][:, None]).min(axis=0))
                high_v[s] = np.minimum(high_v[s], end)
                caps[s] = np.maximum(np.minimum(cap, high_v[s] - low_u[s]), 0.0)
                ok &= (cap >= 0) & (high_v[s] >= low_u[s] * (1 - 1e-12))
                if s + 1 < stages:
                    high_u[s + 1] = np.minimum(high_v[s] + highs[s], stops - after[s + 1])
                    high_u[s + 1] = np.minimum(high_u[s + 1], caps[: s + 1].sum(axis=0) + before[s + 1])
            ok &= high_v[-1] >= starts * (1 - 1e-12)
            for s in range(stages - 1, -1, -1):
                low_u[s] = np.maximum(low_u[s], low_v[s] - caps[s])
                low_u[s] = np.maximum(low_u[s], starts - caps[s:].sum(axis=0) - most_after[s])
                window = turns[s, s:] > 0
                if window.any():
                    count = turns[s, s:][window][:, None]
                    low_u[s] = np.maximum(
                        low_u[s], ((count * low_v[s:][window] - slack) / (count + 1)).max(axis=0)
                    )
                if s:
                    low_v[s - 1] = np.maximum(low_v[s - 1], low_u[s] - highs[s - 1])
            ok &= low_u[0] <= 1e-9 * step_s
        return caps, ok

    def _rounds(self, step_s: float, low_v: Array, in_flight: int, least: list[int]) -> Array:
        """Most seconds of the first of these stages, when it works through all microbatches from the first
        on and the last one turns at stage e, or the first one does and it works through the rest."""
        m, capacity = self.m, self.capacity
        turned = np.array(least)[:, None] - 1.0
        steady = max(0, m - in_flight)
        own = np.maximum(
            (m - 1) * capacity.forward + (steady + turned) * capacity.backward,
            (steady + turned) * capacity.forward + (m - 1) * capacity.backward,
        )
        most: Array = ((step_s - low_v) / np.maximum(own, 1e-300)).min(axis=0)
        return most

    def _ends(self, room: Array, low_v: Array, numbers: list[int]) -> Array:
        """Most seconds of the first of these stages, by what its warm-up and its last round must take: up to
        stage e and back, with k_e − 1 forwards or backwards of its own before or after."""
        k = numbers[0]
        far = (np.array(numbers) - 1)[:, None].astype(float)
        fill = low_v
        middle = self.m - 1 - k
        out = np.full_like(room, np.inf)
        for head, tail in ((fill, fill), (fill, fill[-1:]), (fill[-1:], fill)):
            first, last = (far[-1:] if x is not fill else far for x in (head, tail))
            own = first * self.capacity.forward + middle + last * self.capacity.backward
            most = np.where(own > 0, (room - head - tail) / np.maximum(own, 1e-300), np.inf)
            out = np.minimum(out, most.min(axis=0))
        return out

    def _turns(self, numbers: list[int]) -> tuple[Whole, Whole]:
        """[s, e]: how many turns from s to e and back fit between the first backward and the last forward,
        and how many microbatches are left over (0 turns: none)."""
        key = tuple(numbers)
        if key not in self._known_turns:
            count = len(numbers)
            turns = np.zeros((count, count), dtype=np.int64)
            rest = np.zeros((count, count), dtype=np.int64)
            for s, k in enumerate(numbers):
                for e in range(s, count):
                    span = k - numbers[e] + 1
                    if self.m > k and span >= 1:
                        turns[s, e], rest[s, e] = divmod(self.m - 1 - k, span)
            self._known_turns[key] = turns, rest
        return self._known_turns[key]

    def _holds(self, groups: dict[int, tuple[int, Array, int]], budget: Array) -> Flags:
        """Whether devices with these caps might hold the whole model in ``budget`` seconds together.

        By one multiplier μ ≥ 0: price held ≤ μ · budget + Σ over the chosen of max over t of (price(t) − μ
        t).
        """
        capacity = self.capacity
        rates = capacity.rate
        mus = np.unique(np.concatenate([[0.0], rates]))
        if len(mus) > 16:
            mus = mus[np.linspace(0, len(mus) - 1, 16).astype(int)]
        free = np.sort(capacity.least)[::-1][: capacity.tiny].sum()
        total = (budget + free)[:, None] * mus[None, :]
        for g, (size, cap, in_flight) in groups.items():
            devices = range(self.model.devices) if g < 0 else self.clusters.members[g]
            gains = np.stack([capacity.gain(d, cap, in_flight, mus) for d in devices])  # (devices, P, μ)
            if size < len(gains):
                gains = np.partition(gains, len(gains) - size, axis=0)[len(gains) - size :]
            total += gains.sum(axis=0)
        held: Flags = total.min(axis=1) >= 1 - MARGIN
        return held
