"""The costs of a device as a replica of all layers: time, exposed gradients, memory.

A plan of data parallelism has one pipeline of one stage on each of its replicas. Devices are indices in the
problem's order. The model of time and memory is the contract's (``docs/contract.md``, Data parallelism).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from skyctl.errors import InputError
from skyctl.planner.cost_model import CostModel, StageAssignment
from skyctl.planner.routes.layout_table import LayoutTable
from skyctl.planner.stage_memory import fits_device
from skyctl.planner.step_costs import StepCosts
from skyctl.records.problem import Problem


class GradientExposure:
    """How long gradients are under way after a replica's last backward, as a function of the summing's speed.

    Layers are summed from the last to the first. With w seconds a byte, what is left after a replica's
    computing is the largest, over the layers k, of w · (bytes of layers 0 … k) less the backward of the
    layers before k: a convex function of w, of which the upper envelope's lines are kept.

    Args:
        gradient_bytes: by layer, as they are sent.
        backward_s: by layer, seconds of one backward.

    Attributes:
        hidden_s: of all bytes, at most so many seconds are before the end of computing.
    """

    def __init__(self, gradient_bytes: Sequence[float], backward_s: Sequence[float]) -> None:
        sizes = list(accumulate(gradient_bytes))
        hidden = [0.0, *accumulate(backward_s[:-1])]
        self.hidden_s = hidden[-1]
        hull: list[tuple[float, float]] = []
        for point in zip(sizes, hidden, strict=True):
            if hull and point[0] <= hull[-1][0]:
                continue  # as many bytes, later: the earlier layer's line is above it everywhere
            while len(hull) > 1 and _turns_down(hull[-2], hull[-1], point):
                hull.pop()
            hull.append(point)
        self._hull = hull
        self._slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(hull)]

    def unhidden_s(self, seconds_per_byte: float) -> float:
        """Seconds from the end of the replica's computing to the last byte, if nobody else were later."""
        size, hidden_s = self._hull[bisect_left(self._slopes, seconds_per_byte)]
        return seconds_per_byte * size - hidden_s


def _turns_down(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether b is on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


class ReplicaCost(NamedTuple):
    """A device as a replica of all layers.

    Attributes:
        microbatch_s: seconds of a microbatch's forward and backward, overhead and recomputation included.
        layers_s: the part of ``microbatch_s`` that its layers take.
        optimizer_s: seconds of its optimizer, and of compressing gradients, once a step.
        memory_bytes: what it needs, reserved bytes and what sums keep included, chunks left out.
        recompute: whether it keeps its layers' inputs only.
        exposure: how long gradients are under way after its last backward.
    """

    microbatch_s: float
    layers_s: float
    optimizer_s: float
    memory_bytes: float
    recompute: bool
    exposure: GradientExposure


class ReplicaCosts(StepCosts):
    """One problem of data parallelism as plain numbers: each device as a replica of all layers.

    Attributes:
        may_hold: by device, whether the pins let it hold the first and the last layer, and it is not named
            as a helper.
    """

    def __init__(self, problem: Problem, base: CostModel | None = None) -> None:
        super().__init__(problem, base)
        pins = [names for names in (problem.first_stage, problem.last_stage) if names is not None]
        named = problem.helpers or ()
        self.may_hold = [name not in named and all(name in names for names in pins) for name in self.ids]

    @cached_property
    def layouts(self) -> LayoutTable:
        """The rings and stars of any replicas."""
        return LayoutTable(self)

    def may_help(self, device: int, children: int) -> bool:
        """Whether it has the memory to help with that many arriving edges."""
        described = self.problem.devices[device]
        return fits_device(described.reserved_bytes + self.edge_bytes(children), described)

    @cached_property
    def _costs_of(self) -> list[tuple[ReplicaCost, ...]]:
        """By device, without recomputation, and if it is allowed with it."""
        return [tuple(self._made_costs(d)) for d in range(self.devices)]

    def _made_costs(self, device: int) -> Iterator[ReplicaCost]:
        base = self.base
        forward, backward = base.forward_s[device], base.backward_s[device]
        for recompute in (False, True) if self.may_recompute else (False,):
            sums = [b + f for b, f in zip(backward, forward, strict=True)] if recompute else backward
            layers_s = forward[-1] + sums[-1]
            back = [b - a for a, b in pairwise(sums)]
            whole = StageAssignment(device, 0, self.layers)
            yield ReplicaCost(
                microbatch_s=layers_s + 2 * base.stage_overhead_s(device, 0, self.layers),
                layers_s=layers_s,
                optimizer_s=base.optimizer_s[device][-1],
                memory_bytes=base.device_bytes(whole, 1, recompute=recompute),
                recompute=recompute,
                exposure=GradientExposure(self.late_bytes(0, self.layers), back),
            )

    def least_bytes(self, device: int, children: int = 0) -> float:
        """The fewest bytes that it needs as a replica with that many arriving edges."""
        return min(cost.memory_bytes for cost in self._costs_of[device]) + self.edge_bytes(children)

    def cost(self, device: int, *, recompute: bool) -> ReplicaCost:
        """The device as a replica, whether it has the memory or not. InputError: it may not recompute."""
        costs = self._costs_of[device]
        if recompute and len(costs) == 1:
            raise InputError(f"{self.ids[device]} recomputes, and the problem does not allow it")
        return costs[recompute]

    def fitting_cost(self, device: int, children: int = 0) -> ReplicaCost | None:
        """The device as a replica with that many arriving edges; it recomputes only where it must.

        None: it has no memory for it, or the pins keep it from holding all layers.
        """
        if not self.may_hold[device]:
            return None
        described = self.problem.devices[device]
        for cost in self._costs_of[device]:
            if fits_device(cost.memory_bytes + self.edge_bytes(children), described):
                return cost
        return None
