"""Plays a whole batch of 1F1B plans at once: the simulator's own recurrence, in numpy over stages and plans.

Row r is the stage r before the last. It runs forward n and then backward n − r, so all stages' n-th rounds
depend on round n − 1 and, along the forwards of this round, on the stage before: a running maximum down the
pipeline. Devices that hold nothing take no time in front of the first stage and delay nobody. Links are
first come first served; a message takes the time of its slowest resource, so queues at shared resources are
not played.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]
WIDE = 150
"""From this many plans on, numpy is faster row by row."""


@dataclass
class Rows:
    """Per stage and plan, shape (devices, plans): layers [start, stop), seconds, and the messages to and
    from the next stage (``ahead``, ``back``: seconds on the slowest resource). ``weight``: seconds of weight
    gradients that may be put off, which ``backward`` is without then."""

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


def step_s(rows: Rows, microbatches: int, linked: bool) -> Array:
    """Each plan's step. ``linked``: whether any message takes time."""
    count, plans = rows.forward.shape
    forwards, backwards = _Forwards(rows, linked), _Backwards(rows, linked)
    free = np.zeros((count, plans))
    for n in range(microbatches + count - 1):
        if n < microbatches:
            forwards.play(free)
        backwards.play(free, max(0, n - microbatches + 1), min(count, n + 1))
    if rows.optimizer is not None:
        free += rows.optimizer
    out: Array = free.max(axis=0)
    return out


class _Forwards:
    """One forward of every stage, from the first to the last."""

    def __init__(self, rows: Rows, linked: bool) -> None:
        self.linked = linked
        hop = rows.ahead + rows.ahead_latency
        through = rows.forward + hop
        total = np.cumsum(through[::-1], axis=0)[::-1]
        self.before = total - through  # from the first stage to the start of the stage's forward
        self.after = total - hop  # and to its end
        self.ahead = rows.ahead
        self.hop = hop[1:]
        self.sent = np.zeros(rows.forward.shape)
        self.work = np.empty(rows.forward.shape)

    def play(self, free: Array) -> None:
        work = self.work
        if self.linked:
            np.add(self.sent[1:], self.hop, out=work[:-1])
            np.maximum(work[:-1], free[:-1], out=work[:-1])
            work[-1] = free[-1]
            work -= self.before
        else:
            np.subtract(free, self.before, out=work)
        if work.size < WIDE * len(work):
            np.maximum.accumulate(work[::-1], axis=0, out=work[::-1])
        else:
            for r in range(len(work) - 2, -1, -1):
                np.maximum(work[r], work[r + 1], out=work[r])
        np.add(work, self.after, out=free)
        if self.linked:
            np.maximum(self.sent, free, out=self.sent)
            self.sent += self.ahead


class _Backwards:
    """One backward of the stages [low, high), each of its own microbatch. A gradient goes from row r to row
    r + 1, over the link whose seconds stand at row r + 1."""

    def __init__(self, rows: Rows, linked: bool) -> None:
        self.linked = linked
        self.backward = rows.backward
        self.back, self.latency = rows.back, rows.back_latency
        self.sent = np.zeros(rows.forward.shape)
        self.arrived = np.zeros(rows.forward.shape)

    def play(self, free: Array, low: int, high: int) -> None:
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
