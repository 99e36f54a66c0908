"""Is there a plan below a limit whose weight gradients may be put off (zero-bubble)? No, or not known.

For every set of devices, device d of it and layer q, when exactly these devices hold [q, L) and d is the
first of them, over all their orders and cuts at least:
- ``trip``: one microbatch's forward on d, the way to the end and back, its input gradients on d;
- ``queue``: from d's first forward to its last backward's end, by way of later stages and messages;
- ``step``: from d's first forward to the end of the step.
Weight gradients are nobody's input, so ``trip`` and ``queue`` leave them out. A device has them all to do
after its first backward, before which nothing but forwards can fill its time.
"""

from __future__ import annotations

import numpy as np

from skyctl.planner.verification.problem_data import Array, DeviceKind, ProblemData, Proof, sums

MAX_CELLS = 1.2e8
INF = float("inf")


def prove(facts: ProblemData, below_s: float) -> Proof:
    """Whether no plan's step takes less than ``below_s``."""
    n = facts.devices
    if n > 11 or n * max(1, n - 1) * 2.0 ** max(0, n - 2) * facts.layers**2 > MAX_CELLS:
        return Proof(None, f"{n} devices × {facts.layers} layers are too many for the paths' tables")
    if _Tables(facts).least_s() >= below_s:
        return Proof(True, "every plan has a path as long, weight gradients put off as far as can be")
    return Proof(None, "paths that leave weight gradients out do not rule a better step out")


class _Tables:
    """The tables of one problem."""

    def __init__(self, facts: ProblemData) -> None:
        self.facts = facts
        self.m = facts.microbatches
        self.links = {(link.source, link.target): link for link in facts.problem.links}
        self.parts = [self._times(d) for d in range(facts.devices)]
        self.ways = [[self._message(a, b) for b in range(facts.devices)] for a in range(facts.devices)]
        self.kinds = {d: kind for kind in facts.kinds for d in kind.members}
        self.trip: dict[tuple[int, int], Array] = {}
        self.queue: dict[tuple[int, int], Array] = {}
        self.step: dict[tuple[int, int], Array] = {}
        self._bars: dict[tuple[int, int], Array] = {}
        for chosen in sorted(range(1, 1 << facts.devices), key=int.bit_count):
            if chosen.bit_count() <= facts.most_stages:
                for d in range(facts.devices):
                    if chosen >> d & 1:
                        self._fill(chosen, d)

    def least_s(self) -> float:
        """No plan's step is shorter."""
        return min(
            (float(table[0]) for (_, d), table in self.step.items() if self.facts.may_be_first(d)),
            default=INF,
        )

    def _times(self, device: int) -> tuple[Array, Array, Array, Array]:
        """[start, stop] → seconds of forward, input gradients, weight gradients, optimizer."""
        forward, backward, optimizer = self.facts.columns(device)
        weight = self.facts.weights(device)
        f, b, w, o = (_between(sums(x)) for x in (forward, backward - weight, weight, optimizer))
        overhead = self.facts.overhead_table(device)
        return f + overhead, b + overhead, w, o

    def _message(self, a: int, b: int) -> tuple[Array, float]:
        """(seconds at each boundary on the slowest resource from a to b, latency)."""
        problem = self.facts.problem
        ends = (problem.devices[a].id, problem.devices[b].id)
        link = self.links.get(ends)
        share, rate, latency_s = (1.0, 0.0, 0.0) if link is None else (
            link.sent_share, 1 / link.bandwidth_bytes_per_s, link.latency_s,
        )  # fmt: skip
        for resource in problem.shared:
            if any(tuple(pair) == ends for pair in resource.links):
                rate = max(rate, 1 / resource.bandwidth_bytes_per_s)
        return self.facts.received * (share * rate), latency_s

    def _barred(self, device: int, stages: int) -> Array:
        """[start, stop] → 0 where that stage fits, infinity elsewhere."""
        in_flight = self.facts.least_in_flight(stages)
        if (device, in_flight) not in self._bars:
            kind: DeviceKind = self.kinds[device]._replace(may_be_first=True, may_be_last=True)
            work, layers = self.facts.work(device), self.facts.layers
            fits = [self.facts.stops(kind, q, in_flight, INF, work) for q in range(layers)]
            fits.append(np.zeros(layers + 1, dtype=bool))
            self._bars[device, in_flight] = np.where(np.array(fits), 0.0, INF)
        return self._bars[device, in_flight]

    def _fill(self, chosen: int, d: int) -> None:
        layers, m, stages = self.facts.layers, self.m, chosen.bit_count()
        f, b, w, o = self.parts[d]
        barred = self._barred(d, stages)
        own = m * (f + b + w) + o
        trips, queues, steps = (np.full(layers + 1, INF) for _ in range(3))
        if stages == 1:
            if self.facts.may_be_last(d):
                trips, queues, steps = ((x + barred)[:, layers] for x in (f + b, m * (f + b), own))
            self.trip[chosen, d], self.queue[chosen, d], self.step[chosen, d] = trips, queues, steps
            return
        rest = chosen ^ (1 << d)
        for e in range(self.facts.devices):
            if not rest >> e & 1:
                continue
            (there, out_s), (back, home_s) = self.ways[d][e], self.ways[e][d]
            both = there + back + out_s + home_s
            away = (both + self.trip[rest, e])[None, :]
            many = both + np.maximum(
                self.queue[rest, e], (m - 1) * np.maximum(there, back) + self.trip[rest, e]
            )
            wait = np.maximum(0.0, away - (m - 1) * f)
            queue = np.maximum(f + b + many[None, :], m * (f + b) + wait)
            step = np.maximum(own + wait, queue + w + o)
            step = np.maximum(step, f + (there + out_s + self.step[rest, e])[None, :])
            trips = np.minimum(trips, (f + b + away + barred).min(axis=1))
            queues = np.minimum(queues, (queue + barred).min(axis=1))
            steps = np.minimum(steps, (step + barred).min(axis=1))
        self.trip[chosen, d], self.queue[chosen, d], self.step[chosen, d] = trips, queues, steps


def _between(prefix: Array) -> Array:
    """[start, stop] → the sum of [start, stop); below the diagonal it means nothing."""
    out: Array = np.maximum(0.0, prefix[None, :] - prefix[:, None])
    return out
