"""Objective ``iteration``, few devices: best first over orders and cuts, bounded by ``relax.py``, exact.

A node fixes the first stages and which devices hold the rest. Its bound is the longest path through its
stages with the relaxation of the rest. A node that is a whole plan is simulated. What is left in the heap is
a valid bound whenever the search stops.
"""

from __future__ import annotations

import heapq
import time

import numpy as np

from skyctl.planner.depths import refined, value_s
from skyctl.planner.evaluate import bound_s
from skyctl.planner.found import NOTHING, Found
from skyctl.planner.iteration.relax import Array, Relaxation, own
from skyctl.planner.model import Model, Piece
from skyctl.planner.running import Running

EXACT = 1e-11
"""Relative: a bound this close to the best value can't hide a better plan but for rounding."""
MAX_HEAP = 1_500_000
NEAR = 0.02
"""Plans within this of the best are tried with more depths than a few, where the plan chooses them."""
PLAYS = 60

Pieces = tuple[Piece, ...]


def twins(model: Model) -> list[int]:
    """Per device the lowest index of one that it can be exchanged with, changing nothing."""
    out: list[int] = []
    for d in range(model.devices):
        out.append(next((c for c in range(d) if out[c] == c and _same(model, c, d)), d))
    return out


def _same(model: Model, a: int, b: int) -> bool:
    tables = model.forward, model.backward, model.optimizer, model.available, model.handling, model.neighbour
    if any(table[a] != table[b] for table in tables):
        return False
    if (a in model.first) != (b in model.first) or (a in model.last) != (b in model.last):
        return False
    others = (e for e in range(model.devices) if e not in (a, b))
    return model.way(a, b) == model.way(b, a) and all(
        model.way(a, e) == model.way(b, e) and model.way(e, a) == model.way(e, b) for e in others
    )


class BestFirst:
    """One search. ``best`` holds the incumbent."""

    def __init__(self, model: Model, start: Pieces | None, deadline: float) -> None:
        self.model = model
        self.deadline = deadline
        self.best: tuple[float, Pieces, Running] = (float("inf"), (), NOTHING)
        if start is not None:
            value, running = value_s(model, start)
            self.best = (value, start, running)
        # depths, and who recomputes where messages queue for what they share, are not enumerated
        self.open = model.eager or (model.mixed and bool(model.problem.shared))
        self.relaxation = Relaxation(model)
        self.twins = twins(model)
        self.heap: list[tuple[float, int, Pieces, int, int, int]] = []
        self.count = 0
        self.plays = 0
        self.floor = float("inf")  # least bound of a whole plan whose best in-flight numbers are not proved

    def run(self) -> Found:
        """Searches until proved or out of time."""
        self._roots()
        stopped = False
        steps = 0
        while self.heap and self.heap[0][0] < self._cut():
            steps += 1
            if (steps & 15 == 0 and time.perf_counter() > self.deadline) or len(self.heap) > MAX_HEAP:
                stopped = True
                break
            bound, _, pieces, device, start, subset = heapq.heappop(self.heap)
            if device < 0:
                self._play(pieces, bound)
            else:
                self._expand(pieces, device, start, subset)
        value, pieces, running = self.best
        left = self.heap[0][0] if stopped else value
        bound = min(left, self.floor, value)
        proved = not stopped and self.floor >= self._cut()
        why = "" if proved else (", time out" if stopped else ", not every depth tried")
        method = f"best first over orders and cuts: {self.count} nodes, {self.plays} simulated{why}"
        return Found(pieces, running, value, value if proved else bound, proved, method)

    def _cut(self) -> float:
        return self.best[0] * (1 - EXACT)

    def _canonical(self, device: int, subset: int) -> bool:
        """The lowest of its twins in what is left."""
        twin = self.twins[device]
        return not any(subset >> d & 1 and self.twins[d] == twin for d in range(twin, device))

    def _roots(self) -> None:
        model, relaxation = self.model, self.relaxation
        for subset in range(1, 1 << model.devices):
            lacking = any(
                subset >> d & 1 and self.twins[c] == self.twins[d] and not subset >> c & 1
                for d in range(model.devices)
                for c in range(d)
            )
            if lacking:
                continue  # another subset with the lower twins is the same plan
            for d in range(model.devices):
                if subset >> d & 1 and d in model.first and self._canonical(d, subset):
                    bound = float(relaxation.end[subset][d, 0])
                    if bound < self._cut():
                        self._push(bound, (), d, 0, subset)

    def _push(self, bound: float, pieces: Pieces, device: int, start: int, subset: int) -> None:
        self.count += 1
        heapq.heappush(self.heap, (bound, self.count, pieces, device, start, subset))

    def _play(self, pieces: Pieces, bound: float) -> None:
        self.plays += 1
        value, running = value_s(self.model, pieces)
        if self.model.eager and value < self.best[0] * (1 + NEAR):
            value, running = refined(self.model, pieces, value, running, plays=PLAYS, little=0.0)
        if value < self.best[0]:
            self.best = (value, pieces, running)
        if self.open:
            self.floor = min(self.floor, bound)

    def _whole(self, pieces: Pieces) -> None:
        bound = bound_s(self.model, pieces)
        if bound < self._cut():
            self._push(bound, pieces, -1, 0, 0)

    def _expand(self, pieces: Pieces, d: int, start: int, subset: int) -> None:
        model, relaxation = self.model, self.relaxation
        rest = subset ^ (1 << d)
        if not rest:
            self._whole((*pieces, Piece(d, start, model.layers)))
            return
        stages = subset.bit_count()
        k, least = relaxation.flying(stages)
        stops = slice(start + 1, model.layers - stages + 2)
        f, b = relaxation.forward[d][start, stops], relaxation.backwards(d, least)[start, stops]
        o = relaxation.optimizer[d][start, stops]
        barred = relaxation.barred(d, least)[start, stops]
        for e in range(model.devices):
            if not rest >> e & 1 or not self._canonical(e, rest):
                continue
            beyond, after = relaxation.beyond(d, e, relaxation.end[rest][e], relaxation.trip[rest][e])
            beyond, after = beyond[stops], after[stops]
            end = np.maximum(own(model.microbatches, k, f, b, beyond), f + b + after)
            bounds = self._through(pieces, d, stages, (end, f + b + beyond, o)) + barred
            for i in np.flatnonzero(bounds < self._cut()).tolist():
                stop = start + 1 + i
                self._push(float(bounds[i]), (*pieces, Piece(d, start, stop)), e, stop, rest)

    def _through(self, pieces: Pieces, d: int, stages: int, tail: tuple[Array, Array, Array]) -> Array:
        """The bound with the stages before, given (end, trip, optimizer) of the stage on d, one of
        ``stages`` to the last."""
        end, trip, o = tail
        model, relaxation = self.model, self.relaxation
        total = len(pieces)
        fill = self._fill(pieces, d)
        out = end + o + fill[total]
        following = d
        for s in range(total - 1, -1, -1):
            a, p, q = pieces[s]
            there, back, latency = relaxation.ways[a][following]
            both = float(there[q] + back[q]) + latency
            loaded = both + (model.microbatches - 1) * float(max(there[q], back[q]))
            k, least = relaxation.flying(stages + total - s)
            f, b = float(relaxation.forward[a][p, q]), float(relaxation.backwards(a, least)[p, q])
            through = f + b + np.maximum(both + end, loaded + trip)
            beyond = both + trip
            end = np.maximum(own(model.microbatches, k, f, b, beyond), through)
            trip = f + b + beyond
            out = np.maximum(out, end + (fill[s] + float(relaxation.optimizer[a][p, q])))
            following = a
        return out

    def _fill(self, pieces: Pieces, d: int) -> list[float]:
        """When each stage, and the one on d, can start at the earliest."""
        out = [0.0]
        for s, (a, p, q) in enumerate(pieces):
            e = pieces[s + 1].device if s + 1 < len(pieces) else d
            seconds, latency = self.model.occupancy_s(a, e, q)
            out.append(out[-1] + float(self.relaxation.forward[a][p, q]) + seconds + latency)
        return out
