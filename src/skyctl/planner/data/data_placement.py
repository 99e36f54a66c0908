"""A candidate of data parallelism: who holds the layers, who computes how much, and what a step takes so."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from skyctl.planner.data.holder_costs import DataModel, HolderCost, chunk_bytes_at, message_factor
from skyctl.planner.data.route_fill import fill_s
from skyctl.planner.data.route_layouts import (
    DeviceRoute,
    Layout,
    RouteUse,
    busiest_byte_s,
    children_of,
    layouts_of,
    use_of,
)
from skyctl.planner.data.set_bounds import ONE_LINE
from skyctl.planner.data.shares import level_in_parts_s, level_shares
from skyctl.planner.data.tree_layouts import pack_set
from skyctl.records.problem import Problem

LEAST_GAIN, LEAST_GAIN_UNASKED = 1e-3, 0.05
"""Relative: trees that save less of a step are not taken in the place of a ring, a star or one device; the
larger where nobody asked for trees: their sums take up to a tenth longer than predicted, where a ring's take
up to a twentieth, and a sum is a part of the step."""


def least_gain(problem: Problem) -> float:
    """Of a step, what trees must save in this problem to be taken; naming a helper asks for them."""
    return LEAST_GAIN if problem.sync == "trees" or problem.helpers else LEAST_GAIN_UNASKED


@dataclass(frozen=True)
class HolderGroup:
    """Holders and how they sum gradients, without shares: whatever the number of microbatches.

    Attributes:
        layout: None where the routes come from a plan's record.
        byte_s: seconds that a byte of gradient takes on the busiest link, shared resource or helper.
        microbatch_s: by holder, t.
        extra_s: by holder, e: with m microbatches its layers' sums are done after m · t + e. With a delay it
            is ready for the next step after that, its optimizer and its processor's part of sums included.
        chunk_bytes: of a message, at most.
        fill_s: what messages take beyond that, which pass deep trees edge by edge.
        beside_s: with a delay, what the whole sum takes, beside which the next step is computed; else 0.
        edge_bytes: by holder, what it keeps for the edges of its routes (``DataModel.edge_bytes``).
    """

    holders: tuple[int, ...]
    layout: Layout | None
    costs: tuple[HolderCost, ...]
    use: RouteUse
    byte_s: float
    microbatch_s: tuple[float, ...]
    extra_s: tuple[float, ...]
    chunk_bytes: int
    fill_s: float = 0.0
    delayed: bool = False
    beside_s: float = 0.0
    edge_bytes: tuple[float, ...] = ()

    @property
    def helpers(self) -> tuple[int, ...]:
        """The devices on its routes that hold nothing, ascending."""
        return helpers_on(self.use, self.holders)

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
            waited_s = max(0.0, self.beside_s - summed_s)
            return DataPlacement(self, tuple(shares), max(summed_s, self.beside_s), waited_s)
        return DataPlacement(
            group=self,
            shares=tuple(shares),
            iteration_s=summed_s + self.after_s,
            sync_s=summed_s + self.fill_s + self.use.latency_s - computed_s,
        )

    def best_placement(self, microbatches: int, below_s: float = math.inf) -> DataPlacement | None:
        """The candidate with the best shares; None: too few microbatches, or no step below ``below_s``."""
        least_s = level_in_parts_s(self.microbatch_s, self.extra_s, microbatches) + self.after_s
        least_s = max(least_s, self.beside_s)
        if microbatches < len(self.holders) or least_s >= below_s:
            return None
        shares = level_shares(self.microbatch_s, self.extra_s, microbatches)
        assert shares is not None
        placed = self.with_shares(shares)
        return placed if placed.iteration_s < below_s else None


@dataclass(frozen=True)
class DataPlacement:
    """Holders with their shares of a step's microbatches, and what the step takes.

    ``sync_s``: seconds of it from the last backward of all to the last byte of the sum; with a delay, what
    the slowest holder waits for the sum.
    """

    group: HolderGroup
    shares: tuple[int, ...]
    iteration_s: float
    sync_s: float

    @property
    def holders(self) -> tuple[int, ...]:
        """The devices, in the order of ``shares``."""
        return self.group.holders

    @property
    def compute_s(self) -> tuple[float, ...]:
        """By holder, of its layers and optimizer; with a delay also its processor's part of sums."""
        group = self.group
        more_s = group.extra_s if group.delayed else [cost.optimizer_s for cost in group.costs]
        return tuple(m * t + e for m, t, e in zip(self.shares, group.microbatch_s, more_s, strict=True))

    @property
    def memory_bytes(self) -> tuple[float, ...]:
        """What each holder needs, chunks included."""
        pairs = zip(self.group.costs, self.group.edge_bytes, strict=True)
        return tuple(cost.memory_bytes + edges for cost, edges in pairs)


def processor_byte_s(model: DataModel, use: RouteUse, device: int, factor: float = 1.0) -> float:
    """Seconds of the device's processor for a byte of gradient: adding, sending and receiving.

    ``factor``: of sending and receiving (``message_factor``).
    """
    described = model.problem.devices[device]
    adding_s = described.reduce_byte_s * use.added.get(device, 0.0)
    return adding_s + factor * described.message_byte_s * use.passed.get(device, 0.0)


def helpers_on(use: RouteUse, holders: Sequence[int]) -> tuple[int, ...]:
    """The devices that routes go over and that are no holders, ascending."""
    return tuple(sorted(use.passed.keys() - set(holders)))


def make_group(
    model: DataModel,
    holders: tuple[int, ...],
    costs: Sequence[HolderCost],
    routes: Sequence[DeviceRoute],
    layout: Layout | None = None,
    chunk_bytes: int | None = None,
) -> HolderGroup:
    """Holders of given costs that sum over these routes, whether they have the memory or not.

    ``chunk_bytes``: of a message; None: as suits the busiest line.
    """
    use = use_of(routes, model.latency_s)
    helping_s = [processor_byte_s(model, use, d) for d in helpers_on(use, holders)]
    byte_s = max(busiest_byte_s(use, model.byte_s, model.shared), *helping_s, 0.0)
    delayed = bool(model.problem.rhythm.delay)
    factor = message_factor(model.problem, byte_s)
    busy_s = [processor_byte_s(model, use, d, factor) * model.total_bytes for d in holders]
    extra_s = tuple(
        # a gradient is under way while earlier layers are computed; adding and sending take processor time
        busy + cost.optimizer_s if delayed else max(cost.exposure.at(byte_s), busy)
        for busy, cost in zip(busy_s, costs, strict=True)
    )
    times = tuple(cost.microbatch_s for cost in costs)
    simple = layout is not None and not layout.trees  # a ring and a star fill no tree
    chunk_bytes = chunk_bytes or chunk_bytes_at(byte_s, model.passes)
    filled_s = 0.0 if simple else fill_s(model, routes, holders, chunk_bytes)
    beside_s = model.total_bytes * byte_s + filled_s + use.latency_s if delayed else 0.0
    edges = tuple(model.edge_bytes(use.children.get(d, 0)) for d in holders)
    return HolderGroup(
        holders,
        layout,
        tuple(costs),
        use,
        byte_s,
        times,
        extra_s,
        chunk_bytes,
        filled_s,
        delayed,
        beside_s,
        edges,
    )


def fitting_group(model: DataModel, layout: Layout) -> HolderGroup | None:
    """The holders of a layout; None: one of them or a helper has no memory for it, or a pin forbids it."""
    routes = layout.routes()
    children = children_of(routes)
    costs = []
    for d in layout.holders:
        cost = model.fitting_cost(d, children.get(d, 0))
        if cost is None:
            return None
        costs.append(cost)
    group = make_group(model, layout.holders, costs, routes, layout)
    return group if all(model.may_help(d, children.get(d, 0)) for d in group.helpers) else None


def fitting_groups(model: DataModel, holders: tuple[int, ...]) -> Iterator[HolderGroup]:
    """The ways for these holders to sum that fit in memory: in a ring, in a star at each.

    Those of them that the problem's ``sync`` leaves (``server``: at each helper as well); packed trees are
    looked for elsewhere.
    """
    helpers = model.helpers_of(holders) if model.problem.sync == "server" else ()
    return _fitting(model, layouts_of(holders, model.problem.sync, helpers))


def fitting_trees(model: DataModel, holders: tuple[int, ...], deadline: float) -> Iterator[HolderGroup]:
    """The packed trees of two holders or more that fit in their memory.

    None where the problem's ``sync`` asks for a ring or a star. ``deadline``: as in ``pack_set``.
    """
    if model.problem.sync in ONE_LINE or len(holders) < 2:
        return iter(())
    return _fitting(model, pack_set(model, holders, deadline).layouts)


def _fitting(model: DataModel, layouts: Iterable[Layout]) -> Iterator[HolderGroup]:
    groups = (fitting_group(model, layout) for layout in layouts)
    return (group for group in groups if group is not None)


def asked_groups(model: DataModel, holders: tuple[int, ...], deadline: float) -> list[HolderGroup]:
    """All ways to sum that the problem's ``sync`` asks for and that fit; see ``fitting_trees``."""
    trees = list(fitting_trees(model, holders, deadline))
    if model.problem.sync == "trees" and trees:
        return trees
    return [*fitting_groups(model, holders), *trees]


def best_of_groups(
    groups: Iterable[HolderGroup], microbatches: int, below_s: float = math.inf
) -> DataPlacement | None:
    """The best candidate of these groups; None: no step of less than ``below_s`` is possible."""
    best = None
    for group in groups:
        placed = group.best_placement(microbatches, below_s)
        if placed is not None:
            best, below_s = placed, placed.iteration_s
    return best


def best_of_set(
    model: DataModel, holders: tuple[int, ...], below_s: float = math.inf
) -> DataPlacement | None:
    """The best candidate with just these holders and a step of less than ``below_s``; None: there is none."""
    if model.microbatches < len(holders):
        return None
    return best_of_groups(fitting_groups(model, holders), model.microbatches, below_s)
