"""Predicts steps while nodes of a plan are away, and with others: the same model of a step, for those there.

Nothing is planned anew. The pipelines that are left keep their stages, share out the step's microbatches by
their predicted pace and sum over what is left of the routes, as ranks do with ``--elastic``
(``worker.elastic``). A device that enters holds all layers, and exchanges with the roots of the routes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from skyctl.planner.candidate import AS_MEASURED, Candidate, PlannedPipeline, SumGroup
from skyctl.planner.plan_record import read_candidate
from skyctl.planner.rhythms import StepEnds, next_step
from skyctl.planner.routes.route_layouts import DeviceRoute, Layout
from skyctl.planner.step import play, play_alone
from skyctl.planner.step_costs import StepCosts
from skyctl.records.cluster import node_of
from skyctl.records.plan import Plan
from skyctl.records.plan_nodes import nodes_in
from skyctl.records.problem import Problem
from skyctl.worker.elastic.microbatch_shares import deal, even_shares
from skyctl.worker.elastic.route_trees import routes_among
from skyctl.worker.rank_order import RouteTree

MOST_NODES = 64
"""Of plans with more nodes nobody waits for each one's figure."""


@dataclass(frozen=True)
class StepWithout:
    """The time that a step takes without a node.

    Attributes:
        step_s: predicted seconds; None: no pipeline is left.
        factor: of the plan's step; None as above.
        leaving_step_s: of the step in which the node leaves, as late as it can; None as above.
    """

    node: str
    step_s: float | None
    factor: float | None
    leaving_step_s: float | None


def steps_without(plan: Plan) -> tuple[StepWithout, ...]:
    """By node of the plan, helpers included, what a step takes without all of its devices.

    None for one pipeline, for updates that are late, stale or made in rounds, and for more than
    ``MOST_NODES`` nodes.
    """
    nodes = nodes_in(plan)
    if len(plan.pipelines) < 2 or not plan.problem.rhythm.is_synchronous or len(nodes) > MOST_NODES:
        return ()
    steps = RemainingSteps(plan)
    planned_s = plan.predicted.iteration_s
    found = []
    for node in nodes:
        away = {device.id for device in plan.problem.devices if node_of(device.id) == node}
        step_s = steps.step_s(away)
        factor = None if step_s is None else step_s / planned_s if planned_s > 0 else 1.0
        found.append(StepWithout(node, step_s, factor, steps.leaving_step_s(away)))
    return tuple(found)


class RemainingSteps:
    """Predicts a plan's steps while some of its devices are away. A pipeline goes with any of its devices.

    Args:
        plan: one that sums gradients before each next step.
        problem: of the same layers, with devices that enter; None: the plan's.
    """

    def __init__(self, plan: Plan, problem: Problem | None = None) -> None:
        self._costs = StepCosts(problem or plan.problem)
        self._planned = read_candidate(self._costs, plan)
        self._used = {*(stage.device for stage in plan.placed_stages), *plan.helpers}
        self._paces = [self._pace_s(pipeline) for pipeline in self._planned.pipelines]

    def step_s(self, away: Collection[str] = (), entered: Collection[str] = ()) -> float | None:
        """Seconds of a step; None: no pipeline is left.

        Args:
            away: device ids.
            entered: ids of devices that hold all layers, and are not on the plan's routes. One that is away
                may be among them: it is back.
        """
        left = self._left(away)
        return (
            play(self._costs, self._candidate(left, away, entered)).iteration_s if left or entered else None
        )

    def microbatch_s(self, device: str) -> float:
        """Seconds that a device takes for a microbatch of all layers."""
        return self._pace_s(self._alone_on(device))

    def leaving_step_s(self, leaving: Collection[str], away: Collection[str] = ()) -> float | None:
        """Seconds of a step in which devices leave once its sum has all but ended; None: as ``step_s``.

        Their microbatches are made again, shared out among those that are left, and then all is summed again.
        How long nobody notices that they are gone is not in it.

        Args:
            leaving: ids of devices that leave.
            away: of those that are away already.
        """
        gone = {*away, *leaving}
        before, left = self._left(away), self._left(gone)
        if not left:
            return None
        begun = self._candidate(before, away)
        missing = sum(
            pipeline.microbatches
            for number, pipeline in zip(before, begun.pipelines, strict=True)
            if number not in left
        )
        dealt = deal(missing, {number: self._paces[number] for number in left}, {})
        again = [self._with(number, count) for number, count in dealt.items() if count]
        made_s = max((play_alone(self._costs, pipeline).end_s for pipeline in again), default=0.0)
        optimizer_s = max(max(self._without_layers(pipeline).optimizer_s) for pipeline in begun.pipelines)
        remaining = self._candidate(left, gone)
        played = [self._without_layers(pipeline) for pipeline in remaining.pipelines]
        summed_s = next_step(self._costs, remaining, played, AS_MEASURED).iteration_s
        return play(self._costs, begun).iteration_s - optimizer_s + made_s + summed_s

    def run_s(self, away: Iterable[Collection[str]]) -> float | None:
        """Seconds of a run's steps; None: in one of them no pipeline is left.

        Args:
            away: for each step, the ids of the devices that are away when it ends. Those that were there when
                the step before ended leave in it, as late as they can; those that come begin with it.
        """
        total_s = 0.0
        before: frozenset[str] = frozenset()
        for now in map(frozenset, away):
            leaving = now - before
            step_s = self.leaving_step_s(leaving, before & now) if leaving else self.step_s(now)
            if step_s is None:
                return None
            total_s += step_s
            before = now
        return total_s

    def _left(self, away: Collection[str]) -> list[int]:
        """The numbers of the pipelines that have all of their devices."""
        return [
            number
            for number, placement in enumerate(self._planned.placements)
            if not any(self._costs.ids[stage.device] in away for stage in placement)
        ]

    def _pace_s(self, pipeline: PlannedPipeline) -> float:
        return max(stage.forward_s + stage.backward_s for stage in self._costs.simulated(pipeline).stages)

    def _alone_on(self, device: str) -> PlannedPipeline:
        """A planned pipeline's layers on that device, as one stage."""
        pipeline = self._planned.pipelines[0]
        (stage,) = pipeline.placement
        return pipeline._replace(placement=(stage._replace(device=self._costs.ids.index(device)),))

    def _candidate(
        self, left: Collection[int], away: Collection[str], entered: Collection[str] = ()
    ) -> Candidate:
        """The candidate of a step by those pipelines and the devices that have entered."""
        if self._used.isdisjoint(away) and not entered:
            return self._planned
        gone = [placement for number, placement in enumerate(self._planned.placements) if number not in left]
        absent = {d for d, name in enumerate(self._costs.ids) if name in away}
        absent |= {stage.device for placement in gone for stage in placement}
        there = {number: self._planned.pipelines[number] for number in left}
        new = [self._costs.ids.index(device) for device in entered]
        there |= {len(self._paces) + d: self._alone_on(self._costs.ids[d]) for d in new}
        paces = {number: self._pace_s(pipeline) for number, pipeline in there.items()}
        shares = even_shares(self._costs.microbatches, paces)
        pipelines = tuple(_with(there[number], stop - first) for number, (first, stop) in shares.items())
        sums = [self._group(group, absent, new) for group in self._planned.sums] if len(there) > 1 else []
        return Candidate(pipelines, tuple(sums))

    def _with(self, number: int, microbatches: int) -> PlannedPipeline:
        """A planned pipeline with so many microbatches."""
        return _with(self._planned.pipelines[number], microbatches)

    def _group(self, group: SumGroup, absent: Collection[int], new: Collection[int] = ()) -> SumGroup:
        """A group's sum over what is left of its routes, and from their roots to devices that are new."""
        trees = [RouteTree(*route) for route in group.routed.layout.trees]
        there = set(range(self._costs.devices)) - set(absent) - set(new)
        left = routes_among(trees, there, new)
        layout = Layout(
            replicas=tuple(sorted({*(d for d in group.replicas if d in there), *new})),
            trees=tuple(DeviceRoute(tree.share, tree.root, tree.up, tree.down) for tree in left),
        )
        return self._costs.group(group.start, group.stop, layout, group.chunk_bytes)

    def _without_layers(self, pipeline: PlannedPipeline) -> StepEnds:
        """A pipeline that has nothing to compute but its optimizer."""
        optimizer_s = self._costs.base.optimizer_s.of(pipeline.placement)
        return StepEnds([0.0] * len(optimizer_s), optimizer_s)


def _with(pipeline: PlannedPipeline, microbatches: int) -> PlannedPipeline:
    """The pipeline with so many microbatches."""
    in_flight = tuple(min(count, microbatches) for count in pipeline.execution.in_flight)
    execution = pipeline.execution._replace(in_flight=in_flight)
    return pipeline._replace(microbatches=microbatches, execution=execution)
