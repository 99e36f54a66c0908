"""The least sum that a chain of stages can take where memory is limited: a lower bound by filling.

A device's stage is a range of layers that its memory holds, so its work is at most that of the best such
range. Fast devices filled so, one after the other, until all work is placed: no plan's sum is smaller, since
it places the same work, on each device no more than that.
"""

from __future__ import annotations

import math

from skyctl.records.problem import Problem


def least_sum_s(asked: Problem) -> float:
    """Seconds of one step, for ``sequential`` with the layers' flops as costs; links ignored. Infinity where
    the devices together hold less than all layers."""
    left = math.fsum(layer.flops for layer in asked.layers)
    sum_s = 0.0
    for device in sorted(asked.devices, key=lambda d: -d.flops_per_s):
        room = math.inf if device.memory_bytes is None else device.memory_bytes - device.reserved_bytes
        taken = min(left, most_flops(asked, room))
        sum_s += asked.microbatches * taken / device.flops_per_s
        left -= taken
        if left <= 0:
            return sum_s
    return math.inf


def most_flops(asked: Problem, room: float) -> float:
    """The most work of any range of layers that fits, with one microbatch in flight."""
    best = flops = held = 0.0
    start = 0
    for layer in asked.layers:
        flops += layer.flops
        held += layer.state_bytes + layer.activation_bytes
        while held > room:
            first = asked.layers[start]
            flops -= first.flops
            held -= first.state_bytes + first.activation_bytes
            start += 1
        best = max(best, flops)
    return best
