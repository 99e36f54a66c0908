"""A candidate of data parallelism: who holds the layers, who computes how much, and what a step takes so."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from skyctl.planner.candidate import Candidate, PlannedPipeline
from skyctl.planner.cost_model import StageAssignment
from skyctl.planner.data.replica_costs import ReplicaCost, ReplicaCosts
from skyctl.planner.data.set_bounds import ONE_LINE
from skyctl.planner.data.tree_layouts import pack_set
from skyctl.planner.evaluation import StageExecution
from skyctl.planner.routes.layout_table import MOST_ORDERED
from skyctl.planner.routes.route_fill import fill_s
from skyctl.planner.routes.route_layouts import Layout, RouteUse, busiest_byte_s
from skyctl.planner.step_costs import helpers_on
from skyctl.planner.sum_costs import chunk_bytes_at, message_factor
from skyctl.records.problem import Problem
from skyctl.schedule.batch_shares import best_shares, level_in_parts_s

Floats = npt.NDArray[np.float64]

LEAST_GAIN, LEAST_GAIN_UNASKED = 1e-3, 0.05
"""Relative: trees that save less of a step are not taken in the place of a ring, a star or one device; the
larger where nobody asked for trees: their sums take up to a tenth longer than predicted, where a ring's take
up to a twentieth, and a sum is a part of the step."""


def least_gain(problem: Problem) -> float:
    """Of a step, what trees must save in this problem to be taken; naming a helper asks for them."""
    return LEAST_GAIN if problem.sync == "trees" or problem.helpers else LEAST_GAIN_UNASKED


@dataclass(frozen=True)
class ReplicaGroup:
    """Replicas and how they sum gradients, without shares: whatever the number of microbatches.

    Attributes:
        byte_s: seconds that a byte of gradient takes on the busiest link, shared resource or helper.
        microbatch_s: by replica, t.
        extra_s: by replica, e: with m microbatches its layers' sums are done after m · t + e. With a delay it
            is ready for the next step after that, its optimizer and its processor's part of sums included.
        fill_s: what messages take beyond that, which pass deep trees edge by edge.
        overlapped_s: with a delay, what the whole sum takes, beside which the next step is computed; else 0.
    """

    replicas: tuple[int, ...]
    layout: Layout
    costs: tuple[ReplicaCost, ...]
    use: RouteUse
    byte_s: float
    microbatch_s: tuple[float, ...]
    extra_s: tuple[float, ...]
    fill_s: float = 0.0
    delayed: bool = False
    overlapped_s: float = 0.0

    @property
    def helpers(self) -> tuple[int, ...]:
        """The devices on its routes that hold nothing, ascending."""
        return helpers_on(self.use, self.replicas)

    @property
    def after_s(self) -> float:
        """Seconds from the last gradient's sum to the step's end: fill, latency, the slowest optimizer.

        None with a delay.
        """
        if self.delayed:
            return 0.0
        return self.fill_s + self.use.latency_s + max(cost.optimizer_s for cost in self.costs)

    def with_shares(self, shares: Sequence[int]) -> DataPlacement:
        """The candidate with these shares."""
        each = list(zip(shares, self.microbatch_s, self.extra_s, strict=True))
        computed_s = max(m * t for m, t, _ in each)
        summed_s = max(m * t + e for m, t, e in each)
        if self.delayed:
            waited_s = max(0.0, self.overlapped_s - summed_s)
            return DataPlacement(self, tuple(shares), max(summed_s, self.overlapped_s), waited_s)
        return DataPlacement(
            group=self,
            shares=tuple(shares),
            iteration_s=summed_s + self.after_s,
            sync_s=summed_s + self.fill_s + self.use.latency_s - computed_s,
        )

    def best_placement(self, microbatches: int, below_s: float = math.inf) -> DataPlacement | None:
        """The candidate with the best shares; None: too few microbatches, or no step below ``below_s``."""
        least_s = level_in_parts_s(microbatches, self.extra_s, self.microbatch_s) + self.after_s
        least_s = max(least_s, self.overlapped_s)
        if microbatches < len(self.replicas) or least_s >= below_s:
            return None
        placed = self.with_shares(best_shares(microbatches, self.extra_s, self.microbatch_s))
        return placed if placed.iteration_s < below_s else None


@dataclass(frozen=True)
class DataPlacement:
    """Replicas with their shares of a step's microbatches, and what the step takes.

    ``sync_s``: seconds of it from the last backward of all to the last byte of the sum; with a delay, what
    the slowest replica waits for the sum.
    """

    group: ReplicaGroup
    shares: tuple[int, ...]
    iteration_s: float
    sync_s: float

    @property
    def replicas(self) -> tuple[int, ...]:
        """The devices, in the order of ``shares``."""
        return self.group.replicas

    def candidate(self, model: ReplicaCosts) -> Candidate:
        """One pipeline of one stage for each replica, and their sum."""
        layers, group = model.layers, self.group
        pipelines = tuple(
            PlannedPipeline(
                (StageAssignment(d, 0, layers),), StageExecution((1,), (0,), (cost.recompute,)), share
            )
            for d, share, cost in zip(self.replicas, self.shares, group.costs, strict=True)
        )
        if len(pipelines) == 1:
            return Candidate(pipelines)
        return Candidate(pipelines, (model.group(0, layers, group.layout),))


def fitting_group(model: ReplicaCosts, layout: Layout) -> ReplicaGroup | None:
    """The replicas of a layout; None: one of them or a helper has no memory for it, or a pin forbids it."""
    replicas, children = layout.replicas, layout.children()
    costs = []
    for d in replicas:
        cost = model.fitting_cost(d, children.get(d, 0))
        if cost is None:
            return None
        costs.append(cost)
    use = layout.use(model.latency_s)
    helpers = helpers_on(use, replicas)
    if not all(model.may_help(d, children.get(d, 0)) for d in helpers):
        return None
    helping_s = [model.processor_byte_s(use, d) for d in helpers]
    byte_s = max(busiest_byte_s(use, model.byte_s, model.shared), *helping_s, 0.0)
    delayed = bool(model.problem.rhythm.delay)
    factor = message_factor(model.problem, byte_s)
    busy_s = [model.processor_byte_s(use, d, factor) * model.total_bytes for d in replicas]
    extra_s = tuple(
        # a gradient is under way while earlier layers are computed; adding and sending take processor time
        busy + cost.optimizer_s if delayed else max(cost.exposure.unhidden_s(byte_s), busy)
        for busy, cost in zip(busy_s, costs, strict=True)
    )
    filled_s = 0.0  # a ring and a star fill no tree
    if layout.trees:
        chunk_bytes = chunk_bytes_at(byte_s, model.passes)
        filled_s = fill_s(model, layout.trees, replicas, model.total_bytes, chunk_bytes)
    overlapped_s = model.total_bytes * byte_s + filled_s + use.latency_s if delayed else 0.0
    times = tuple(cost.microbatch_s for cost in costs)
    return ReplicaGroup(
        replicas, layout, tuple(costs), use, byte_s, times, extra_s, filled_s, delayed, overlapped_s
    )


def fitting_groups(model: ReplicaCosts, replicas: tuple[int, ...]) -> Iterator[ReplicaGroup]:
    """The ways for these replicas to sum that fit in memory: in rings, in a star at each.

    Those of them that the problem's ``sync`` leaves (``server``: at each helper as well); packed trees are
    looked for elsewhere.
    """
    layouts = (Layout(replicas),) if len(replicas) == 1 else model.layouts.terms(replicas).layouts
    return _fitting(model, (*layouts, *_helped_stars(model, replicas)))


def _helped_stars(model: ReplicaCosts, replicas: tuple[int, ...]) -> Iterator[Layout]:
    """Stars at helpers, which ``server`` may have."""
    if model.problem.sync == "server" and len(replicas) > 1:
        yield from (Layout(replicas, root) for root in model.helpers_of(replicas))


def fitting_trees(model: ReplicaCosts, replicas: tuple[int, ...], deadline: float) -> Iterator[ReplicaGroup]:
    """The packed trees of two replicas or more that fit in their memory.

    None where the problem's ``sync`` asks for a ring or a star. ``deadline``: as in ``pack_set``.
    """
    if model.problem.sync in ONE_LINE or len(replicas) < 2:
        return iter(())
    return _fitting(model, pack_set(model, replicas, deadline).layouts)


def _fitting(model: ReplicaCosts, layouts: Iterable[Layout]) -> Iterator[ReplicaGroup]:
    groups = (fitting_group(model, layout) for layout in layouts)
    return (group for group in groups if group is not None)


def asked_groups(model: ReplicaCosts, replicas: tuple[int, ...], deadline: float) -> list[ReplicaGroup]:
    """All ways to sum that the problem's ``sync`` asks for and that fit; see ``fitting_trees``."""
    trees = list(fitting_trees(model, replicas, deadline))
    if model.problem.sync == "trees" and trees:
        return trees
    return [*fitting_groups(model, replicas), *trees]


def best_of_groups(
    groups: Iterable[ReplicaGroup], microbatches: int, below_s: float = math.inf
) -> DataPlacement | None:
    """The best candidate of these groups; None: no step of less than ``below_s`` is possible."""
    best = None
    for group in groups:
        placed = group.best_placement(microbatches, below_s)
        if placed is not None:
            best, below_s = placed, placed.iteration_s
    return best


def best_of_set(
    model: ReplicaCosts, replicas: tuple[int, ...], below_s: float = math.inf
) -> DataPlacement | None:
    """The best candidate with just these replicas and a step of less than ``below_s``; None: none."""
    if model.microbatches < len(replicas):
        return None
    costs = [model.fitting_cost(d) for d in replicas]
    fitting = [cost for cost in costs if cost is not None]
    if len(fitting) < len(costs):
        return None
    if len(replicas) == 1:
        return best_of_groups(fitting_groups(model, replicas), model.microbatches, below_s)
    terms = model.layouts.terms(replicas)
    floors_s = floors_of(model, fitting, terms.byte_s, terms.latency_s)
    best = None
    for k in np.argsort(floors_s, kind="stable").tolist():
        if floors_s[k] >= below_s:
            break
        group = fitting_group(model, terms.layouts[k])
        placed = None if group is None else group.best_placement(model.microbatches, below_s)
        if placed is not None:
            best, below_s = placed, placed.iteration_s
    helped = best_of_groups(_fitting(model, _helped_stars(model, replicas)), model.microbatches, below_s)
    return helped or best


def floors_of(model: ReplicaCosts, costs: Sequence[ReplicaCost], byte_s: Floats, latency_s: Floats) -> Floats:
    """By layout, what no step of these replicas is below, processors' part of sums left out.

    Args:
        costs: of the replicas.
        byte_s, latency_s: by layout, seconds a byte takes and seconds of latency.
    """
    times = [cost.microbatch_s for cost in costs]
    optimizers = [cost.optimizer_s for cost in costs]
    sums_s = model.total_bytes * byte_s
    if model.problem.rhythm.delay:
        return np.maximum(level_in_parts_s(model.microbatches, optimizers, times), sums_s + latency_s)
    level_s = level_in_parts_s(model.microbatches, [0.0] * len(costs), times)
    hidden_s = max(cost.exposure.hidden_s for cost in costs)
    return level_s + np.maximum(0.0, sums_s - hidden_s) + latency_s + max(optimizers)


def may_miss_ring(model: ReplicaCosts, replicas: tuple[int, ...], below_s: float) -> bool:
    """Whether a ring that was not looked at might have a step of less than ``below_s``."""
    if len(replicas) <= MOST_ORDERED:
        return False
    least = model.layouts.terms(replicas).least_ring
    costs = [cost for d in replicas if (cost := model.fitting_cost(d)) is not None]
    if least is None or len(costs) < len(replicas):
        return False
    byte_s, latency_s = (np.array([value]) for value in least)
    return bool(floors_of(model, costs, byte_s, latency_s)[0] < below_s)
