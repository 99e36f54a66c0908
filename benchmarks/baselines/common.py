"""The parts of a problem that the baselines know: layers' costs, devices' speeds and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from skyctl.errors import SkyctlError
from skyctl.records.problem import Problem

Assignment = list[tuple[str, int, int]]
"""(device, start, stop) in pipeline order, half-open, as ``skyctl.plan`` takes it."""


class NotApplicableError(SkyctlError):
    """The method ends without an assignment, or needs a figure that the problem does not have."""


def costs(problem: Problem) -> list[float]:
    """Forward and backward flops of each layer; where there are only measured times, the fastest device's."""
    flops = [layer.flops for layer in problem.layers]
    if any(flops):
        return flops
    fastest = min(problem.devices, key=lambda device: whole_s(problem, device.id))
    times = problem.times[fastest.id]
    return [f + b for f, b in zip(times.forward_s, times.backward_s, strict=True)]


def whole_s(problem: Problem, device: str) -> float:
    """Seconds a device takes for one microbatch of the whole model: what a benchmark on it would give."""
    times = problem.times.get(device)
    if times is not None:
        return math.fsum(times.forward_s) + math.fsum(times.backward_s)
    speed = next(x.flops_per_s for x in problem.devices if x.id == device)
    return math.fsum(layer.flops for layer in problem.layers) / speed


def speeds(problem: Problem) -> list[float]:
    """Whole models a second, per device."""
    return [1 / whole_s(problem, device.id) for device in problem.devices]


def layer_bytes(problem: Problem) -> list[float]:
    """The bytes that each layer needs with one microbatch in flight."""
    return [layer.state_bytes + layer.activation_bytes for layer in problem.layers]


def free_bytes(problem: Problem) -> list[float]:
    """The bytes that each device has for layers; infinity where it is unlimited."""
    return [
        math.inf if d.memory_bytes is None else d.memory_bytes - d.reserved_bytes for d in problem.devices
    ]


def assignment(problem: Problem, cuts: Sequence[int]) -> Assignment:
    """Device d gets layers [cuts[d], cuts[d + 1]); those with none are left out."""
    return [
        (device.id, start, stop)
        for device, start, stop in zip(problem.devices, cuts, cuts[1:], strict=False)
        if stop > start
    ]


def prefix(values: Sequence[float]) -> list[float]:
    """[0, v0, v0 + v1, …]."""
    out = [0.0]
    for value in values:
        out.append(out[-1] + value)
    return out
