"""Lower bounds on the rest of a step, for every set of devices that may hold it: dynamic programming.

``end[set][d, q]``: the least seconds from the start of the first forward to the end of the last backward on
device d, when d's stage starts at layer q and the devices of ``set`` (d among them) hold exactly [q, L).
``trip[set][d, q]``: the least one microbatch needs from there to the end and back. Each is the minimum over
all orders and cuts of the paths that ``evaluate.bound_s`` takes, so it is valid for every plan.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from skyctl.planner.model import Model

Array = npt.NDArray[np.float64]
MAX_DEVICES = 11
MAX_CELLS = 1.5e8
FEW_CELLS = 1e6
"""Worth it however little time is left."""
CELLS_PER_S = 1.5e7
INF = float("inf")


def can(model: Model, left_s: float) -> bool:
    """Whether the tables are made well within ``left_s`` (a few seconds at most)."""
    n = model.devices
    cells = n * max(1, n - 1) * 2.0 ** max(0, n - 2) * model.layers**2
    return n <= MAX_DEVICES and cells <= max(FEW_CELLS, min(MAX_CELLS, CELLS_PER_S * left_s))


class Relaxation:
    """The tables of one problem, and one stage's matrices over (start, stop)."""

    def __init__(self, model: Model) -> None:
        self.model = model
        n, layers = model.devices, model.layers
        self.beside = [self._beside(d) for d in range(n)]
        self.forward = [_differences(x) + h for x, h in zip(model.forward, self.beside, strict=True)]
        self.backward = [_differences(x) + h for x, h in zip(model.backward, self.beside, strict=True)]
        if model.zero:  # what the stage before waits for
            self.weight = [_differences(x) for x in model.weight]
            pairs = zip(self.backward, self.weight, strict=True)
            self.backward = [np.maximum(0.0, whole - part) for whole, part in pairs]
        self.optimizer = [_differences(x) for x in model.optimizer]
        self.ways = [[self._way(a, b) for b in range(n)] for a in range(n)]
        self._barred: dict[tuple[int, int], Array] = {}
        self._again: dict[tuple[int, int], Array] = {}
        self.end: list[Array] = [np.full((n, layers + 1), INF) for _ in range(1 << n)]
        self.trip: list[Array] = [np.full((n, layers + 1), INF) for _ in range(1 << n)]
        for subset in sorted(range(1, 1 << n), key=lambda s: (s.bit_count(), s)):
            if subset.bit_count() <= model.max_stages:
                for d in range(n):
                    if subset >> d & 1:
                        self._fill(subset, d)

    def _beside(self, device: int) -> Array:
        """What a stage's forward, and its backward, takes beside its layers."""
        at = np.arange(self.model.layers + 1)
        neighbours = np.add.outer((at > 0).astype(float), (at < self.model.layers).astype(float))
        out: Array = self.model.handling[device] + self.model.neighbour[device] * neighbours
        return out

    def _way(self, a: int, b: int) -> tuple[Array, Array, float]:
        """Per boundary: seconds of a message there, seconds back; and both latencies together."""
        size = np.array([0.0, *self.model.output])
        out = []
        latency = 0.0
        for x, y in ((a, b), (b, a)):
            way = self.model.way(x, y)
            out.append(size * max((way.seconds_per_byte, *(rate for _, rate in way.shared))))
            latency += way.latency_s
        return out[0], out[1], latency

    def flying(self, stages: int) -> tuple[int, int]:
        """(for time, for memory) in flight of a stage with that many stages from it to the end."""
        least = self.model.flying(0, stages)
        return (self.model.microbatches if self.model.eager else least), least

    def barred(self, device: int, flying: int) -> Array:
        """0 where [start, stop) is a range that fits, infinity elsewhere."""
        key = (device, flying)
        if key not in self._barred:
            fits = self._fits(device, flying, recompute=False)
            if self.model.mixed:
                so = self._fits(device, flying, recompute=True)
                self._again[key] = np.where(fits, 0.0, self.forward[device] - self.beside[device])
                fits |= so
            self._barred[key] = np.where(fits, 0.0, INF)
        return self._barred[key]

    def backwards(self, device: int, flying: int) -> Array:
        """Seconds of a backward: with another forward where a stage fits only if it recomputes."""
        if not self.model.mixed:
            return self.backward[device]
        self.barred(device, flying)
        return self.backward[device] + self._again[device, flying]

    def _fits(self, device: int, flying: int, *, recompute: bool) -> npt.NDArray[np.bool_]:
        model, layers = self.model, self.model.layers
        state, kept, peak = model.tables(recompute=recompute)
        need = _differences(state) + flying * _differences(kept)
        for start in range(layers):
            need[start, start + 1 :] += np.maximum.accumulate(peak[start:])
        received = np.array([0.0, *model.output])
        ahead, back = received.copy(), received.copy()
        back[layers] = 0.0
        need += model.window * (ahead[:, None] + back[None, :])
        rows = np.arange(layers + 1)
        out: npt.NDArray[np.bool_] = (rows[:, None] < rows[None, :]) & (need <= model.available[device])
        return out

    def _fill(self, subset: int, d: int) -> None:
        model = self.model
        stages = subset.bit_count()
        k, least = self.flying(stages)
        barred = self.barred(d, least)
        f, b = self.forward[d], self.backwards(d, least)
        if stages == 1:
            if d in model.last:
                last = model.layers
                busy = f[:, last] + b[:, last]
                self.trip[subset][d] = busy + barred[:, last]
                self.end[subset][d] = (
                    own(model.microbatches, k, f[:, last], b[:, last], 0.0) + barred[:, last]
                )
            return
        rest = subset ^ (1 << d)
        ends = np.full(model.layers + 1, INF)
        trips = np.full(model.layers + 1, INF)
        for e in range(model.devices):
            if rest >> e & 1 and np.isfinite(self.end[rest][e]).any():
                beyond, after = self.beyond(d, e, self.end[rest][e], self.trip[rest][e])
                end = np.maximum(own(model.microbatches, k, f, b, beyond[None, :]), f + b + after[None, :])
                ends = np.minimum(ends, (end + barred).min(axis=1))
                trips = np.minimum(trips, (f + b + beyond[None, :] + barred).min(axis=1))
        self.end[subset][d] = ends
        self.trip[subset][d] = trips

    def beyond(self, d: int, e: int, end: Array, trip: Array) -> tuple[Array, Array]:
        """Per boundary from d to e: what one microbatch takes beyond d, and what all of them add to d's own
        forward and backward by e's end or the link's load."""
        there, back, latency = self.ways[d][e]
        both = there + back + latency
        loaded = both + (self.model.microbatches - 1) * np.maximum(there, back) + trip
        return both + trip, np.maximum(both + end, loaded)


def own(m: int, flying: int, forward: Any, backward: Any, beyond: Any) -> Any:
    """``evaluate.own_s`` on arrays."""
    wait = np.maximum(0.0, beyond - (flying - 1) * forward)
    if m > flying:
        tail = np.maximum(beyond, (flying - 1) * backward)
        out = m * forward + (m - flying + 1) * backward + wait + tail
    else:
        out = m * forward + np.maximum(m * backward + wait, backward + beyond)
    turns = -(-m // flying)
    rest = m - 1 - (turns - 1) * flying
    return np.maximum(out, turns * (forward + backward + beyond) + rest * backward)


def _differences(prefix: list[float]) -> Array:
    """[start, stop] → sum of [start, stop); below the diagonal it means nothing."""
    sums = np.array(prefix)
    out: Array = np.maximum(0.0, sums[None, :] - sums[:, None])
    return out
