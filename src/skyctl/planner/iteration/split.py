"""Lower bound on a step whose weight gradients may be put off (zero-bubble), for few devices.

On the tables of ``relax.py``, where a backward is what the stage before waits for, and with any number in
flight: ``step[set][d, q]`` is the least seconds from the start of the first forward on device d to the end
of the step, when exactly the devices of ``set`` hold [q, L), d the first of them. For d itself that is all
its forwards, backwards and weight gradients and what it must wait before its first backward (until then
there is nothing but forwards to do), or the last backward's end, one microbatch's weight gradients and the
optimizer; for the stages after it, one forward and message more than for them alone.
"""

from __future__ import annotations

import numpy as np

from skyctl.planner.iteration.relax import INF, Array, Relaxation
from skyctl.planner.model import Model


def least_step_s(model: Model) -> float:
    """No plan's step is shorter. For problems that ``relax.can`` allows."""
    return _Split(model).least_s()


class _Split(Relaxation):
    """Relaxation's tables, and ``step``."""

    def __init__(self, model: Model) -> None:
        self.step: list[Array] = [
            np.full((model.devices, model.layers + 1), INF) for _ in range(1 << model.devices)
        ]
        super().__init__(model)

    def least_s(self) -> float:
        """Over all sets of devices that may begin with one that may be first."""
        first = sorted(self.model.first)
        return min((float(table[first, 0].min()) for table in self.step if first), default=INF)

    def _fill(self, subset: int, d: int) -> None:
        super()._fill(subset, d)
        model, layers = self.model, self.model.layers
        m = model.microbatches
        _, least = self.flying(subset.bit_count())
        barred = self.barred(d, least)
        f, b, w, o = self.forward[d], self.backwards(d, least), self.weight[d], self.optimizer[d]
        if subset.bit_count() == 1:
            if d in model.last:
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
            there, _, _ = self.ways[d][e]
            hop = there + model.way(d, e).latency_s
            later = f + hop[None, :] + self.step[rest][e][None, :]
            steps = np.minimum(steps, (np.maximum(own, later) + barred).min(axis=1))
        self.step[subset][d] = steps
