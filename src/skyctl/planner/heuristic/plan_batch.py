"""Many plans at once, in numpy, for searches: their closed-form costs, and 1F1B plans simulated.

A batch is two integer arrays of shape (devices, plans). Row r of ``order`` is the device r stages before the
last one, row r of ``sizes`` its number of layers; devices that hold nothing follow after the first stage with
size 0. Counted from the last stage, a stage's number in flight and all that comes after it do not depend on
how many stages there are, so the recurrences of ``step_lower_bound_s`` become running sums and maxima down
the rows.

Simulated is the simulator's own recurrence: row r runs forward n and then backward n − r, so all stages' n-th
rounds depend on round n − 1 and, along the forwards of this round, on the previous stage: a running maximum
down the pipeline. Devices that hold nothing take no time in front of the first stage and delay nobody. Links
are first come first served; a message takes the time of its slowest resource, so queues at shared resources
are not simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from skyctl.planner.bottleneck.reach_table import RangeMemory
from skyctl.planner.cost_model import CostModel, Placement, consecutive
from skyctl.schedule.actions import GPIPE, ONE_F_ONE_B, SEQUENTIAL
from skyctl.schedule.steady_state import WHOLE_STEP

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]
ROW_BY_ROW_FROM = 150
"""From this many plans on, numpy is faster row by row."""
PLAYED = 400
"""Microbatches that are played of a step with more than ``WHOLE_STEP``; the others are estimated."""


@dataclass
class StageRows:
    """The stages of a batch, arrays of shape (devices, plans), seconds where nothing else is said.

    Attributes:
        start, stop: layers [start, stop).
        ahead, back: a message to and from the next stage, on its slowest resource.
        weight: weight gradients that can be deferred; ``backward`` is then without them.
    """

    start: Ints
    stop: Ints
    forward: Array
    backward: Array
    optimizer: Array | None
    ahead: Array
    back: Array
    ahead_latency: Array
    back_latency: Array
    weight: Array | None = None


def simulate_batch_s(rows: StageRows, microbatches: int, linked: bool) -> Array:
    """Seconds of each plan's step under 1F1B; of one with thousands of microbatches an estimate, as if the
    later ones took as long as those in the second half of ``PLAYED``.

    ``linked``: whether any message takes time.
    """
    if microbatches <= WHOLE_STEP:
        return _played_batch_s(rows, microbatches, linked)
    half, whole = (_played_batch_s(rows, number, linked) for number in (PLAYED // 2, PLAYED))
    out: Array = whole + (whole - half) * ((microbatches - PLAYED) / (PLAYED - PLAYED // 2))
    return out


def _played_batch_s(rows: StageRows, microbatches: int, linked: bool) -> Array:
    count, plans = rows.forward.shape
    forwards, backwards = _Forwards(rows, linked), _Backwards(rows, linked)
    free = np.zeros((count, plans))
    for n in range(microbatches + count - 1):
        if n < microbatches:
            forwards.advance(free)
        backwards.advance(free, max(0, n - microbatches + 1), min(count, n + 1))
    if rows.optimizer is not None:
        free += rows.optimizer
    out: Array = free.max(axis=0)
    return out


class _Forwards:
    """Simulates one forward of every stage, from the first to the last."""

    def __init__(self, rows: StageRows, linked: bool) -> None:
        self.linked = linked
        message = rows.ahead + rows.ahead_latency
        through = rows.forward + message
        total = np.cumsum(through[::-1], axis=0)[::-1]
        self.before = total - through  # from the first stage to the start of the stage's forward
        self.after = total - message  # and to its end
        self.ahead = rows.ahead
        self.message = message[1:]
        self.sent = np.zeros(rows.forward.shape)
        self.work = np.empty(rows.forward.shape)

    def advance(self, free: Array) -> None:
        """Advances ``free``, when each stage is free, by one forward."""
        work = self.work
        if self.linked:
            np.add(self.sent[1:], self.message, out=work[:-1])
            np.maximum(work[:-1], free[:-1], out=work[:-1])
            work[-1] = free[-1]
            work -= self.before
        else:
            np.subtract(free, self.before, out=work)
        if work.size < ROW_BY_ROW_FROM * len(work):
            np.maximum.accumulate(work[::-1], axis=0, out=work[::-1])
        else:
            for r in range(len(work) - 2, -1, -1):
                np.maximum(work[r], work[r + 1], out=work[r])
        np.add(work, self.after, out=free)
        if self.linked:
            np.maximum(self.sent, free, out=self.sent)
            self.sent += self.ahead


class _Backwards:
    """Simulates one backward of the stages [low, high), each of its own microbatch.

    A gradient goes from row r to row r + 1, over the link whose seconds are in row r + 1.
    """

    def __init__(self, rows: StageRows, linked: bool) -> None:
        self.linked = linked
        self.backward = rows.backward
        self.back, self.latency = rows.back, rows.back_latency
        self.sent = np.zeros(rows.forward.shape)
        self.arrived = np.zeros(rows.forward.shape)

    def advance(self, free: Array, low: int, high: int) -> None:
        """Advances ``free``, when each stage is free, by one backward."""
        out = free[low:high]
        np.maximum(out, self.arrived[low:high], out=out)
        out += self.backward[low:high]
        top = min(high, len(free) - 1)
        if low >= top:
            return
        if self.linked:
            sent = self.sent[low + 1 : top + 1]
            np.maximum(sent, free[low:top], out=sent)
            sent += self.back[low + 1 : top + 1]
            np.add(sent, self.latency[low + 1 : top + 1], out=self.arrived[low + 1 : top + 1])
        else:
            self.arrived[low + 1 : top + 1] = free[low:top]


INF = float("inf")
REACHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)


class PlanBatch:
    """One problem's tables, from which plans are encoded as arrays, costed and decoded."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        n, self.width = model.devices, model.layers + 1
        self.forward = np.array([model.forward_s.array(d) for d in range(n)])
        self.backward = np.array([model.backward_s.array(d) for d in range(n)])
        self.weight = np.array([model.weight_s.array(d) for d in range(n)]) if model.defers_weights else None
        timed = bool(model.problem.times)
        self.optimizer = np.array([model.optimizer_s.array(d) for d in range(n)]) if timed else None
        self.overhead = np.array(model.overhead_s)
        self.neighbour_overhead = np.array(model.neighbour_overhead_s)
        self.output = np.array([0.0, *model.output_bytes])
        self.latency = model.links.latency_s
        self.rate = model.links.message_line_s  # seconds a byte on the slowest resource
        self.shared = model.links.message_slots
        self.linked = bool(self.rate.any() or self.latency.any())
        self.available = np.array(model.available_bytes)
        self.memory = RangeMemory(model)
        self.first = np.array([d in model.may_be_first for d in range(n)])
        self.last = np.array([d in model.may_be_last for d in range(n)])
        self.can_simulate = model.by_iteration and model.schedule == ONE_F_ONE_B
        self.pinned = not (self.first.all() and self.last.all())
        least = [model.least_in_flight(0, min(r + 1, model.max_stages)) for r in range(n)]
        self.least = np.array(least, dtype=np.float64)[:, None]
        left = np.maximum(0, model.microbatches - self.least - 1)
        turns = [(j, np.floor(left / (j + 1))[j:]) for j in REACHES if j < n]
        self.rounds = [(j, rounds) for j, rounds in turns if rounds.any()]

    def encode(self, plans: Sequence[Placement]) -> tuple[Ints, Ints]:
        """Plans as arrays (order, sizes), one column per plan."""
        n = self.model.devices
        order = np.zeros((n, len(plans)), dtype=np.intp)
        sizes = np.zeros((n, len(plans)), dtype=np.intp)
        for i, placement in enumerate(plans):
            used = [stage.device for stage in reversed(placement)]
            order[:, i] = used + [d for d in range(n) if d not in set(used)]
            sizes[: len(placement), i] = [p.stop - p.start for p in reversed(placement)]
        return order, sizes

    def decode(self, order: Ints, sizes: Ints) -> Placement:
        """The plan of one column of ``order`` and ``sizes``."""
        pairs = zip(reversed(order.tolist()), reversed(sizes.tolist()), strict=True)
        return consecutive((d, size) for d, size in pairs if size)

    def rows(self, order: Ints, sizes: Ints) -> StageRows:
        """The layers and seconds of every stage of every plan."""
        start = self.model.layers - np.cumsum(sizes, axis=0)
        stop = start + sizes
        base = order * self.width
        low, high = base + start, base + stop
        forward = self.forward.take(high) - self.forward.take(low)
        backward = self.backward.take(high) - self.backward.take(low)
        if self.model.has_overhead:
            ends = (start > 0) * 1.0 + (stop < self.model.layers)
            overhead = (self.overhead.take(order) + self.neighbour_overhead.take(order) * ends) * (sizes > 0)
            forward, backward = forward + overhead, backward + overhead
        optimizer = None
        if self.optimizer is not None:
            optimizer = self.optimizer.take(high) - self.optimizer.take(low)
        ahead, back, ahead_latency, back_latency = (np.zeros(order.shape) for _ in range(4))
        if self.linked:
            n = self.model.devices
            to, fro = order[1:] * n + order[:-1], order[:-1] * n + order[1:]
            size = self.output.take(stop[1:])
            used = sizes[1:] > 0
            np.multiply(self.rate.take(to), size, out=ahead[1:])
            np.multiply(self.rate.take(fro), size, out=back[1:])
            np.multiply(self.latency.take(to), used, out=ahead_latency[1:])
            np.multiply(self.latency.take(fro), used, out=back_latency[1:])
        weight = None
        if self.weight is not None:
            weight = self.weight.take(high) - self.weight.take(low)
            backward = np.maximum(backward - weight, 0.0)
        return StageRows(
            start, stop, forward, backward, optimizer, ahead, back, ahead_latency, back_latency, weight
        )

    def cost_s(self, order: Ints, sizes: Ints) -> Array:
        """The cost of each plan by the closed form; infinite if the plan is not allowed.

        Exact for ``bottleneck``, sequential and GPipe, a lower bound for 1F1B, for eager 1F1B and zero-bubble
        an estimate with as many microbatches in flight as memory allows; shared resources count by their
        load alone.
        """
        rows = self.rows(order, sizes)
        in_flight, barred = self.least, None
        if not self.model.unlimited or self.model.chooses_depth:
            in_flight, barred = self._flying(order, sizes, rows)
        out = self._step_s(rows, in_flight) if self.model.by_iteration else self._largest_s(rows)
        if self.shared.slots and self.model.by_iteration:
            out = np.maximum(out, self._shared_s(order, rows))
        if barred is not None:
            out[barred] = INF
        if self.pinned:
            top = (sizes > 0).sum(axis=0) - 1
            lead = order[top, np.arange(order.shape[1])]
            out[~(self.first[lead] & self.last[order[0]])] = INF
        return out

    def simulated_cost_s(self, order: Ints, sizes: Ints, below: Array) -> Array:
        """The same, for 1F1B by playing those plans whose closed form is not above ``below``."""
        out = self.cost_s(order, sizes)
        if self.can_simulate:
            chosen = np.flatnonzero(out <= below)
            if len(chosen):
                rows = self.rows(order[:, chosen], sizes[:, chosen])
                played = simulate_batch_s(rows, self.model.microbatches, self.linked)
                out[chosen] = np.maximum(out[chosen], played)
        return out

    def _largest_s(self, rows: StageRows) -> Array:
        busy = rows.forward + rows.backward
        if rows.weight is not None:
            busy += rows.weight
        out: Array = busy.max(axis=0)
        return out

    def _step_s(self, rows: StageRows, in_flight: Array) -> Array:
        m = self.model.microbatches
        f, b = rows.forward, rows.backward
        both = rows.ahead + rows.back
        both += rows.ahead_latency
        both += rows.back_latency
        busy = f + b
        trip = np.cumsum(busy + both, axis=0)
        fill = f + rows.ahead
        fill += rows.ahead_latency
        filled = np.cumsum(fill, axis=0)
        if self.model.schedule == SEQUENTIAL:
            end = trip + filled[-1] - filled + (m - 1) * trip[-1]
        elif self.model.schedule == GPIPE:
            slow = np.maximum(f, rows.ahead).max(axis=0)
            end = np.maximum.accumulate(np.maximum(b, rows.back), axis=0)
            end += slow
            end *= m - 1
            end += np.cumsum(b + rows.back + rows.back_latency, axis=0) + filled[-1]
        else:
            end = self._own_s(f, b, trip - busy, in_flight, trip)
            if self.linked:
                loaded = np.maximum(rows.ahead, rows.back)
                loaded *= m - 1
                loaded += trip
                np.maximum(end, loaded, out=end)
            end -= trip
            np.maximum.accumulate(end, axis=0, out=end)
            end += trip
            end += filled[-1] - filled
        if rows.weight is not None:
            # deferred at will, but not before the first backward: see ``step_lower_bound_s``
            idle = np.maximum(0.0, trip - busy - (in_flight - 1) * f)
            np.maximum(end + rows.weight, filled[-1] - filled + m * (busy + rows.weight) + idle, out=end)
        if rows.optimizer is not None:
            end += rows.optimizer
        out: Array = end.max(axis=0)
        return out

    def _own_s(self, f: Array, b: Array, beyond: Array, in_flight: Array, trip: Array) -> Array:
        """``evaluation.least_span_s``; for 1F1B with ``_add_turns``."""
        m = self.model.microbatches
        before = in_flight - 1
        wait = beyond - before * f
        np.maximum(wait, 0.0, out=wait)
        deep = in_flight >= m
        out = np.maximum(beyond, before * b)
        out += wait
        out += m * f
        out += (m - before) * b
        if self.model.schedule == ONE_F_ONE_B:
            self._add_turns(out, trip, f + b)
        if deep.any():
            out = np.where(deep, m * f + np.maximum(m * b + wait, b + beyond), out)
        turns = np.ceil(m / in_flight)
        turned = turns * beyond
        turned += turns * f
        turned += (m - (turns - 1) * (in_flight - 1)) * b
        np.maximum(out, turned, out=out)
        return out

    def _add_turns(self, end: Array, trip: Array, busy: Array) -> None:
        """Under 1F1B, adds how long each stage waits for its neighbours in steady state.

        From one backward of a stage to the (j + 1)-th after it, j stages further on take part in turn: a
        forward goes there, and the backward whose turn it is comes back. So j + 1 rounds take at least that.
        """
        beyond = trip - busy
        extra = np.zeros(end.shape)
        room = np.empty(end.shape)
        for j, rounds in self.rounds:
            turn = np.subtract(trip[j:], beyond[:-j], out=room[j:])
            turn -= (j + 1) * busy[j:]
            turn *= rounds
            np.maximum(extra[j:], turn, out=extra[j:])
        end += extra

    def _shared_s(self, order: Ints, rows: StageRows) -> Array:
        """Seconds that each plan's messages occupy the shared resource that they occupy most."""
        n, plans = self.model.devices, order.shape[1]
        pairs = np.stack([order[1:] * n + order[:-1], order[:-1] * n + order[1:]])
        size = self.output.take(rows.stop[1:])
        busiest_s = self.shared.busiest_s(pairs, np.arange(plans), size, plans)
        return busiest_s * self.model.microbatches

    def _flying(self, order: Ints, sizes: Ints, rows: StageRows) -> tuple[Array, npt.NDArray[np.bool_]]:
        """(in flight, which plans do not fit): the least, for eager 1F1B the most that memory allows."""
        used = sizes > 0
        fixed, kept = self.memory.need(rows.start, rows.stop)
        spare = self.available.take(order) - fixed
        barred = np.asarray(((spare < self.least * kept) & used).any(axis=0))
        if not self.model.chooses_depth:
            return self.least, barred
        m = self.model.microbatches
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            most = np.floor(np.nan_to_num(spare / kept, nan=m, posinf=m, neginf=1))
        most = np.where(used, np.clip(most, self.least, m), m)
        return np.minimum.accumulate(most[::-1], axis=0)[::-1], barred
