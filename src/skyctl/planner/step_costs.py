"""One problem as plain numbers, whatever its parallelism and rhythm: what ``step.play`` computes with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from skyctl.planner.candidate import GroupRoutes, PlannedPipeline, SumGroup
from skyctl.planner.cost_model import CostModel
from skyctl.planner.evaluation import simulation_input, stage_ends_s
from skyctl.planner.joint_sums import loads_of
from skyctl.planner.routes.route_fill import fill_s
from skyctl.planner.routes.route_layouts import Layout, RouteUse, busiest_byte_s
from skyctl.planner.sum_costs import SumCosts, chunk_bytes_at
from skyctl.planner.summed_bytes import gradient_bytes, summed_bytes, with_added_work
from skyctl.records.problem import Problem
from skyctl.records.rhythm import Rhythm
from skyctl.records.sync_format import ROUNDED_FORMATS
from skyctl.schedule.simulation_input import SimulationInput


def keeps_start(problem: Problem) -> bool:
    """Whether a stage keeps a copy of the weights that the round began with."""
    rhythm = problem.rhythm
    needed = rhythm.prox_mu > 0 or rhythm.has_outer_step
    return problem.owners is not None or needed or rounds_weights(problem)


def rounds_weights(problem: Problem) -> bool:
    """Whether weights are averaged in a format that rounds them, with error feedback."""
    return problem.sync_format in ROUNDED_FORMATS


def sums_anything(problem: Problem) -> bool:
    """Whether pipelines may sum: gradients in a step, or weights after a round."""
    return problem.parallel != "pipeline" or problem.rhythm.is_rounds


def _kept_bytes(problem: Problem) -> list[float]:
    """By layer, what its replica keeps for sums and from round to round, in bytes."""
    if not problem.rhythm.is_rounds:
        return [size.kept for size in summed_bytes(problem)]
    momentum = problem.rhythm.outer_momentum > 0
    copies = float(keeps_start(problem) + momentum + rounds_weights(problem))
    return [copies * gradient_bytes(layer) for layer in problem.layers]


def local_problem(problem: Problem) -> Problem:
    """The problem of one pipeline by itself, in a step or in a local step of a round.

    Layers hold what sums keep as well, and optimizers take what compressing does. The problem of one pipeline
    is its own.
    """
    if not sums_anything(problem):
        return problem
    problem = problem.with_steps_spread()
    layers = tuple(
        layer.model_copy(
            update={"state_bytes": layer.state_bytes + kept, "gradient_bytes": gradient_bytes(layer)}
        )
        for layer, kept in zip(problem.layers, _kept_bytes(problem), strict=True)
    )
    update: dict[str, Any] = {"layers": layers, "parallel": "pipeline", "rhythm": Rhythm(), "owners": None}
    update |= {"sync_format": "float32", "helpers": None, "times": with_added_work(problem).times}
    if problem.rhythm.is_rounds or problem.parallel == "hybrid":
        update["recompute"] = False
    return problem.model_copy(update=update)


class StepCosts(SumCosts):
    """One problem as plain numbers: its pipelines' by ``base``, its sums' by itself.

    Attributes:
        base: the costs of one pipeline with all of a step's microbatches.
        may_recompute: whether stages may keep only their layers' inputs and compute the rest again.
    """

    def __init__(self, problem: Problem, base: CostModel | None = None) -> None:
        super().__init__(problem, None if base is None else base.links)
        self.base = CostModel(local_problem(problem), self.links) if base is None else base
        self.layers, self.devices = self.base.layers, self.base.devices
        self.microbatches = problem.microbatches
        self.may_recompute = self.base.may_recompute
        self._costs: dict[int, CostModel] = {self.microbatches: self.base}
        self._inputs: dict[PlannedPipeline, SimulationInput] = {}

    def costs(self, microbatches: int) -> CostModel:
        """The costs of a pipeline with that many microbatches."""
        if microbatches not in self._costs:
            self._costs[microbatches] = self.base.with_microbatches(microbatches)
        return self._costs[microbatches]

    def simulated(self, pipeline: PlannedPipeline) -> SimulationInput:
        """The simulator's input for a pipeline by itself."""
        if pipeline not in self._inputs:
            costs = self.costs(pipeline.microbatches)
            self._inputs[pipeline] = simulation_input(costs, pipeline.placement, pipeline.execution)
        return self._inputs[pipeline]

    def ends_s(self, pipeline: PlannedPipeline) -> tuple[float, ...]:
        """By stage, when its last backward ends if the pipeline runs by itself; seconds from the start."""
        costs = self.costs(pipeline.microbatches)
        return tuple(stage_ends_s(costs, pipeline.placement, pipeline.execution))

    def processor_byte_s(self, use: RouteUse, device: int, factor: float = 1.0) -> float:
        """Seconds of a device's processor for a byte of gradient: adding, sending and receiving.

        ``factor``: of sending and receiving (``message_factor``).
        """
        described = self.problem.devices[device]
        adding_s = described.reduce_byte_s * use.added.get(device, 0.0)
        return adding_s + factor * described.message_byte_s * use.passed.get(device, 0.0)

    def pass_s(self, device: int, start: int, stop: int) -> float:
        """Seconds of a device to go over the weights of layers [start, stop) once, as when it adds them."""
        weights = math.fsum(map(gradient_bytes, self.problem.layers[start:stop]))
        return self.problem.devices[device].reduce_byte_s * weights

    def routed(self, layout: Layout) -> GroupRoutes:
        """A layout with what a byte of gradient takes on its routes."""
        use = layout.use(self.latency_s)
        helping = {(d, d): self.processor_byte_s(use, d) for d in helpers_on(use, layout.replicas)}
        byte_s = max(busiest_byte_s(use, self.byte_s, self.shared), *helping.values(), 0.0)
        loads = (*loads_of(self, use), *((name, seconds) for name, seconds in helping.items() if seconds))
        return GroupRoutes(layout, use, byte_s, loads)

    def group(self, start: int, stop: int, layout: Layout, chunk_bytes: int | None = None) -> SumGroup:
        """The sum of layers [start, stop) in a layout.

        ``chunk_bytes``: of a message; None: as suits the busiest line.
        """
        size = math.fsum(self.layer_bytes[start:stop])
        routed = self.routed(layout)
        chunk_bytes = chunk_bytes or chunk_bytes_at(routed.byte_s, self.passes)
        filled_s = 0.0  # a ring and a star fill no tree
        if layout.trees:
            filled_s = fill_s(self, layout.trees, layout.replicas, size, chunk_bytes)
        return SumGroup(start, stop, layout.replicas, size, routed, chunk_bytes, filled_s)


def helpers_on(use: RouteUse, replicas: Sequence[int]) -> tuple[int, ...]:
    """The devices that routes go over and that are no replicas, ascending."""
    return tuple(sorted(use.passed.keys() - set(replicas)))
