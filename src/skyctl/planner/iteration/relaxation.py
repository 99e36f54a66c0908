"""Lower bounds on the rest of a step, for every set of devices that may hold it: dynamic programming.

``end[set][d, q]``: the least seconds from the start of the first forward to the end of the last backward on
device d, when d's stage starts at layer q and the devices of ``set`` (d among them) hold exactly [q, L).
``trip[set][d, q]``: the least one microbatch needs from there to the end and back. Each is the minimum over
all orders and cuts of the paths that ``evaluation.step_lower_bound_s`` takes, so it is valid for every plan.

With deferred weight gradients (zero-bubble) a backward is what the previous stage waits for, and any number
may be in flight: ``step[set][d, q]`` is the least seconds from the start of the first forward on device d to
the end of the step. For d itself that is all its forwards, backwards and weight gradients and what it must
wait before its first backward (until then there is nothing but forwards to do), or the last backward's end,
one microbatch's weight gradients and the optimizer; for the stages after it, one forward and message more
than for them alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from skyctl.planner.cost_model import CostModel

Array = npt.NDArray[np.float64]
MAX_DEVICES = 11
MAX_CELLS = 1.5e8
FEW_CELLS = 1e6
"""Table entries that are always worth computing, however little time is left."""
CELLS_PER_S = 1.5e7
INF = float("inf")


def relaxation_fits(model: CostModel, left_s: float) -> bool:
    """Whether the tables can be computed well within ``left_s`` seconds."""
    n = model.devices
    if n > MAX_DEVICES:
        return False
    cells = n * max(1, n - 1) * 2.0 ** max(0, n - 2) * model.layers**2
    return cells <= max(FEW_CELLS, min(MAX_CELLS, CELLS_PER_S * left_s))


class Relaxation:
    """The tables of one problem, and each stage's matrices over (start, stop)."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        n, layers = model.devices, model.layers
        self.overhead = [self._overhead(d) for d in range(n)]
        self.forward = [_differences(x) + h for x, h in zip(model.forward_s, self.overhead, strict=True)]
        self.backward = [_differences(x) + h for x, h in zip(model.backward_s, self.overhead, strict=True)]
        if model.defers_weights:  # what the stage before waits for
            self.weight = [_differences(x) for x in model.weight_s]
            pairs = zip(self.backward, self.weight, strict=True)
            self.backward = [np.maximum(0.0, whole - part) for whole, part in pairs]
        self.optimizer = [_differences(x) for x in model.optimizer_s]
        self.messages = [[self._message(a, b) for b in range(n)] for a in range(n)]
        self._barred: dict[tuple[int, int], Array] = {}
        self._recomputed: dict[tuple[int, int], Array] = {}
        self.end: list[Array] = [np.full((n, layers + 1), INF) for _ in range(1 << n)]
        self.trip: list[Array] = [np.full((n, layers + 1), INF) for _ in range(1 << n)]
        for subset in sorted(range(1, 1 << n), key=lambda s: (s.bit_count(), s)):
            if subset.bit_count() <= model.max_stages:
                for d in range(n):
                    if subset >> d & 1:
                        self._fill(subset, d)

    def _overhead(self, device: int) -> Array:
        """[start, stop] → seconds that a stage's forward, and its backward, takes besides its layers."""
        at = np.arange(self.model.layers + 1)
        neighbours = np.add.outer((at > 0).astype(float), (at < self.model.layers).astype(float))
        out: Array = self.model.overhead_s[device] + self.model.neighbour_overhead_s[device] * neighbours
        return out

    def _message(self, a: int, b: int) -> tuple[Array, Array, float]:
        """By boundary, seconds of a message there and of one back; and both latencies together."""
        size = np.array([0.0, *self.model.output_bytes])
        out = []
        latency = 0.0
        for x, y in ((a, b), (b, a)):
            link = self.model.link_cost(x, y)
            out.append(size * link.slowest_s_per_byte)
            latency += link.latency_s
        return out[0], out[1], latency

    def in_flight(self, stages: int) -> tuple[int, int]:
        """In-flight numbers (for time, for memory) of a stage, given the stages from it to the end."""
        least = self.model.least_in_flight(0, stages)
        return (self.model.microbatches if self.model.chooses_depth else least), least

    def barred(self, device: int, in_flight: int) -> Array:
        """[start, stop] → 0 where the range fits the device, infinity elsewhere."""
        key = (device, in_flight)
        if key not in self._barred:
            fits = self._fits(device, in_flight, recompute=False)
            if self.model.may_recompute:
                so = self._fits(device, in_flight, recompute=True)
                self._recomputed[key] = np.where(fits, 0.0, self.forward[device] - self.overhead[device])
                fits |= so
            self._barred[key] = np.where(fits, 0.0, INF)
        return self._barred[key]

    def backwards(self, device: int, in_flight: int) -> Array:
        """[start, stop] → seconds of a backward, with another forward where a stage must recompute to fit."""
        if not self.model.may_recompute:
            return self.backward[device]
        self.barred(device, in_flight)
        return self.backward[device] + self._recomputed[device, in_flight]

    def _fits(self, device: int, in_flight: int, *, recompute: bool) -> npt.NDArray[np.bool_]:
        model, layers = self.model, self.model.layers
        state, kept, peak = model.memory_tables(recompute=recompute)
        need = _differences(state) + in_flight * _differences(kept)
        for start in range(layers):
            need[start, start + 1 :] += np.maximum.accumulate(peak[start:])
        received = np.array([0.0, *model.output_bytes])
        ahead, back = received.copy(), received.copy()
        back[layers] = 0.0
        need += model.receive_window * (ahead[:, None] + back[None, :])
        rows = np.arange(layers + 1)
        out: npt.NDArray[np.bool_] = (rows[:, None] < rows[None, :]) & (need <= model.available_bytes[device])
        return out

    def _fill(self, subset: int, d: int) -> None:
        model = self.model
        stages = subset.bit_count()
        k, least = self.in_flight(stages)
        barred = self.barred(d, least)
        f, b = self.forward[d], self.backwards(d, least)
        if stages == 1:
            if d in model.may_be_last:
                last = model.layers
                busy = f[:, last] + b[:, last]
                self.trip[subset][d] = busy + barred[:, last]
                self.end[subset][d] = (
                    least_spans_s(model.microbatches, k, f[:, last], b[:, last], 0.0) + barred[:, last]
                )
            return
        rest = subset ^ (1 << d)
        ends = np.full(model.layers + 1, INF)
        trips = np.full(model.layers + 1, INF)
        for e in range(model.devices):
            if rest >> e & 1 and np.isfinite(self.end[rest][e]).any():
                beyond, after = self.beyond(d, e, self.end[rest][e], self.trip[rest][e])
                end = np.maximum(
                    least_spans_s(model.microbatches, k, f, b, beyond[None, :]), f + b + after[None, :]
                )
                ends = np.minimum(ends, (end + barred).min(axis=1))
                trips = np.minimum(trips, (f + b + beyond[None, :] + barred).min(axis=1))
        self.end[subset][d] = ends
        self.trip[subset][d] = trips

    def beyond(self, d: int, e: int, end: Array, trip: Array) -> tuple[Array, Array]:
        """By boundary from d to e: what one microbatch takes beyond d, and what all of them add to d's own
        forward and backward, by e's end or the link's load."""
        there, back, latency = self.messages[d][e]
        both = there + back + latency
        loaded = both + (self.model.microbatches - 1) * np.maximum(there, back) + trip
        return both + trip, np.maximum(both + end, loaded)


def least_spans_s(m: int, in_flight: int, forward: Any, backward: Any, beyond: Any) -> Any:
    """``evaluation.least_span_s`` on arrays."""
    wait = np.maximum(0.0, beyond - (in_flight - 1) * forward)
    if m > in_flight:
        tail = np.maximum(beyond, (in_flight - 1) * backward)
        out = m * forward + (m - in_flight + 1) * backward + wait + tail
    else:
        out = m * forward + np.maximum(m * backward + wait, backward + beyond)
    turns = -(-m // in_flight)
    rest = m - 1 - (turns - 1) * in_flight
    return np.maximum(out, turns * (forward + backward + beyond) + rest * backward)


def _differences(prefix: list[float]) -> Array:
    """[start, stop] → the sum over [start, stop); meaningless below the diagonal."""
    sums = np.array(prefix)
    out: Array = np.maximum(0.0, sums[None, :] - sums[:, None])
    return out


def deferred_step_bound_s(model: CostModel) -> float:
    """A lower bound on any plan's step with deferred weight gradients; see ``relaxation_fits``."""
    return _DeferredRelaxation(model).least_s()


class _DeferredRelaxation(Relaxation):
    """The tables of ``Relaxation``, and ``step``."""

    def __init__(self, model: CostModel) -> None:
        self.step: list[Array] = [
            np.full((model.devices, model.layers + 1), INF) for _ in range(1 << model.devices)
        ]
        super().__init__(model)

    def least_s(self) -> float:
        """The least step over all sets of devices, in seconds."""
        first = sorted(self.model.may_be_first)
        return min((float(table[first, 0].min()) for table in self.step if first), default=INF)

    def _fill(self, subset: int, d: int) -> None:
        super()._fill(subset, d)
        model, layers = self.model, self.model.layers
        m = model.microbatches
        _, least = self.in_flight(subset.bit_count())
        barred = self.barred(d, least)
        f, b, w, o = self.forward[d], self.backwards(d, least), self.weight[d], self.optimizer[d]
        if subset.bit_count() == 1:
            if d in model.may_be_last:
                self.step[subset][d] = (m * (f + b + w) + o + barred)[:, layers]
            return
        rest = subset ^ (1 << d)
        steps = np.full(layers + 1, INF)
        for e in range(model.devices):
            if not (rest >> e & 1) or not np.isfinite(self.step[rest][e]).any():
                continue
            beyond, after = self.beyond(d, e, self.end[rest][e], self.trip[rest][e])
            wait = np.maximum(0.0, beyond[None, :] - (m - 1) * f)
            own = np.maximum(m * (f + b + w) + wait, f + b + after[None, :] + w) + o
            there, _, _ = self.messages[d][e]
            message_s = there + model.link_cost(d, e).latency_s
            later = f + message_s[None, :] + self.step[rest][e][None, :]
            steps = np.minimum(steps, (np.maximum(own, later) + barred).min(axis=1))
        self.step[subset][d] = steps
