"""Many plans at once: the closed-form bound of ``evaluate.bound_s`` in numpy, for searches.

A batch is two integer arrays of shape (devices, plans). Row r of ``order`` is the device r stages before the
last one, row r of ``sizes`` its number of layers; devices that hold nothing follow after the first stage with
size 0. Counted from the last stage, a stage's number in flight and all that comes after it do not depend on
how many stages there are, so the recurrences of ``bound_s`` become running sums and maxima down the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from skyctl.planner.heuristic.plays import Array, Ints, Rows, step_s
from skyctl.planner.heuristic.room import Room
from skyctl.planner.model import Model, Piece
from skyctl.schedule.actions import GPIPE, ONE_F_ONE_B, SEQUENTIAL

Pieces = tuple[Piece, ...]
INF = float("inf")
REACHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)


class Batch:
    """The tables of one problem."""

    def __init__(self, model: Model) -> None:
        self.model = model
        n, self.width = model.devices, model.layers + 1
        self.forward = np.array([model.forward.array(d) for d in range(n)])
        self.backward = np.array([model.backward.array(d) for d in range(n)])
        self.weight = np.array([model.weight.array(d) for d in range(n)]) if model.zero else None
        timed = bool(model.problem.times)
        self.optimizer = np.array([model.optimizer.array(d) for d in range(n)]) if timed else None
        self.handling = np.array(model.handling)
        self.neighbour = np.array(model.neighbour)
        self.output = np.array([0.0, *model.output])
        self.latency = np.zeros((n, n))
        self.rate = np.zeros((n, n))  # seconds a byte on the slowest resource
        shared: dict[int, Array] = {}
        for a, b in _given(model):
            way = model.way(a, b)
            self.latency[a, b] = way.latency_s
            self.rate[a, b] = max((way.seconds_per_byte, *(rate for _, rate in way.shared)))
            for number, rate in way.shared:
                shared.setdefault(number, np.zeros((n, n)))[a, b] = rate
        self.shared = list(shared.values())
        self.linked = bool(self.rate.any() or self.latency.any())
        self.available = np.array(model.available)
        self.room = Room(model)
        self.first = np.array([d in model.first for d in range(n)])
        self.last = np.array([d in model.last for d in range(n)])
        self.playable = model.by_iteration and model.schedule == ONE_F_ONE_B
        self.pinned = not (self.first.all() and self.last.all())
        least = [model.flying(0, min(r + 1, model.max_stages)) for r in range(n)]
        self.least = np.array(least, dtype=np.float64)[:, None]
        left = np.maximum(0, model.microbatches - self.least - 1)
        turns = [(j, np.floor(left / (j + 1))[j:]) for j in REACHES if j < n]
        self.rounds = [(j, rounds) for j, rounds in turns if rounds.any()]

    def encode(self, plans: Sequence[Pieces]) -> tuple[Ints, Ints]:
        """(order, sizes) of plans."""
        n = self.model.devices
        order = np.zeros((n, len(plans)), dtype=np.intp)
        sizes = np.zeros((n, len(plans)), dtype=np.intp)
        for i, pieces in enumerate(plans):
            used = [piece.device for piece in reversed(pieces)]
            order[:, i] = used + [d for d in range(n) if d not in set(used)]
            sizes[: len(pieces), i] = [p.stop - p.start for p in reversed(pieces)]
        return order, sizes

    def decode(self, order: Ints, sizes: Ints) -> Pieces:
        """One plan from its columns."""
        pieces = []
        stop = self.model.layers
        for d, size in zip(order.tolist(), sizes.tolist(), strict=True):
            if size:
                pieces.append(Piece(d, stop - size, stop))
                stop -= size
        return tuple(reversed(pieces))

    def rows(self, order: Ints, sizes: Ints) -> Rows:
        """Each stage's numbers."""
        start = self.model.layers - np.cumsum(sizes, axis=0)
        stop = start + sizes
        base = order * self.width
        low, high = base + start, base + stop
        forward = self.forward.take(high) - self.forward.take(low)
        backward = self.backward.take(high) - self.backward.take(low)
        if self.model.handled:
            ends = (start > 0) * 1.0 + (stop < self.model.layers)
            beside = (self.handling.take(order) + self.neighbour.take(order) * ends) * (sizes > 0)
            forward, backward = forward + beside, backward + beside
        optimizer = None
        if self.optimizer is not None:
            optimizer = self.optimizer.take(high) - self.optimizer.take(low)
        ahead, back, there, home = (np.zeros(order.shape) for _ in range(4))
        if self.linked:
            n = self.model.devices
            to, fro = order[1:] * n + order[:-1], order[:-1] * n + order[1:]
            size = self.output.take(stop[1:])
            used = sizes[1:] > 0
            np.multiply(self.rate.take(to), size, out=ahead[1:])
            np.multiply(self.rate.take(fro), size, out=back[1:])
            np.multiply(self.latency.take(to), used, out=there[1:])
            np.multiply(self.latency.take(fro), used, out=home[1:])
        weight = None
        if self.weight is not None:
            weight = self.weight.take(high) - self.weight.take(low)
            backward = np.maximum(backward - weight, 0.0)
        return Rows(start, stop, forward, backward, optimizer, ahead, back, there, home, weight)

    def cost_s(self, order: Ints, sizes: Ints) -> Array:
        """What each plan costs by the closed form; infinite where it is not allowed.

        Exact for ``bottleneck``, sequential and GPipe, a lower bound for 1F1B, for eager 1F1B and zero-bubble
        an estimate with as many microbatches in flight as memory allows; shared resources count by their
        load alone.
        """
        rows = self.rows(order, sizes)
        flying, barred = self.least, None
        if not self.model.unlimited or self.model.eager:
            flying, barred = self._flying(order, sizes, rows)
        out = self._step_s(rows, flying) if self.model.by_iteration else self._largest_s(rows)
        if self.shared and self.model.by_iteration:
            out = np.maximum(out, self._shared_s(order, rows))
        if barred is not None:
            out[barred] = INF
        if self.pinned:
            top = (sizes > 0).sum(axis=0) - 1
            lead = order[top, np.arange(order.shape[1])]
            out[~(self.first[lead] & self.last[order[0]])] = INF
        return out

    def played_s(self, order: Ints, sizes: Ints, below: Array) -> Array:
        """The same, for 1F1B by playing those plans whose closed form is not above ``below``."""
        out = self.cost_s(order, sizes)
        if self.playable:
            chosen = np.flatnonzero(out <= below)
            if len(chosen):
                rows = self.rows(order[:, chosen], sizes[:, chosen])
                played = step_s(rows, self.model.microbatches, self.linked)
                out[chosen] = np.maximum(out[chosen], played)
        return out

    def _largest_s(self, rows: Rows) -> Array:
        busy = rows.forward + rows.backward
        if rows.weight is not None:
            busy += rows.weight
        out: Array = busy.max(axis=0)
        return out

    def _step_s(self, rows: Rows, flying: Array) -> Array:
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
            end = self._own_s(f, b, trip - busy, flying, trip)
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
            # put off at will, but not before the first backward: see ``evaluate.bound_s``
            idle = np.maximum(0.0, trip - busy - (flying - 1) * f)
            np.maximum(end + rows.weight, filled[-1] - filled + m * (busy + rows.weight) + idle, out=end)
        if rows.optimizer is not None:
            end += rows.optimizer
        out: Array = end.max(axis=0)
        return out

    def _own_s(self, f: Array, b: Array, beyond: Array, flying: Array, trip: Array) -> Array:
        """``evaluate.own_s``; for 1F1B with ``_add_turns``."""
        m = self.model.microbatches
        before = flying - 1
        wait = beyond - before * f
        np.maximum(wait, 0.0, out=wait)
        deep = flying >= m
        out = np.maximum(beyond, before * b)
        out += wait
        out += m * f
        out += (m - before) * b
        if self.model.schedule == ONE_F_ONE_B:
            self._add_turns(out, trip, f + b)
        if deep.any():
            out = np.where(deep, m * f + np.maximum(m * b + wait, b + beyond), out)
        turns = np.ceil(m / flying)
        turned = turns * beyond
        turned += turns * f
        turned += (m - (turns - 1) * (flying - 1)) * b
        np.maximum(out, turned, out=out)
        return out

    def _add_turns(self, end: Array, trip: Array, busy: Array) -> None:
        """1F1B: what a stage waits for its neighbours in steady state.

        From one backward of a stage to the (j + 1)-th after it, j stages further on take part in turn: a
        forward goes there, the backward in turn there comes back. So j + 1 rounds take at least all of that.
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

    def _shared_s(self, order: Ints, rows: Rows) -> Array:
        n = self.model.devices
        to, fro = order[1:] * n + order[:-1], order[:-1] * n + order[1:]
        size = self.output.take(rows.stop[1:])
        loads = [((rate.take(to) + rate.take(fro)) * size).sum(axis=0) for rate in self.shared]
        out: Array = np.max(loads, axis=0) * self.model.microbatches
        return out

    def _flying(self, order: Ints, sizes: Ints, rows: Rows) -> tuple[Array, npt.NDArray[np.bool_]]:
        """(in flight, which plans do not fit): the least, for eager 1F1B the most that memory allows."""
        used = sizes > 0
        fixed, kept = self.room.need(rows.start, rows.stop)
        spare = self.available.take(order) - fixed
        barred = np.asarray(((spare < self.least * kept) & used).any(axis=0))
        if not self.model.eager:
            return self.least, barred
        m = self.model.microbatches
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.floor(np.nan_to_num(spare / kept, nan=m, posinf=m, neginf=1))
        most = np.where(used, np.clip(most, self.least, m), m)
        return np.minimum.accumulate(most[::-1], axis=0)[::-1], barred


def _given(model: Model) -> set[tuple[int, int]]:
    """The pairs of devices with a link or a shared resource."""
    pairs = {(model.index(link.source), model.index(link.target)) for link in model.problem.links}
    for resource in model.problem.shared:
        pairs |= {(model.index(source), model.index(target)) for source, target in resource.links}
    return pairs
