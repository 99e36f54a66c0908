"""What a round takes: every pipeline's local steps, and then the average of their weights.

The model is the contract's (``docs/contract.md``, Rhythms). Nothing is overlapped. Devices are indices in the
problem's order.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from skyctl.planner.cost_model import CostModel, Placement
from skyctl.planner.data.data_placement import processor_byte_s
from skyctl.planner.data.holder_costs import DataModel, buffer_bytes
from skyctl.planner.data.route_layouts import DeviceRoute
from skyctl.planner.data.summed_bytes import SENT_SHARE, gradient_bytes
from skyctl.planner.evaluation import StageExecution, bottleneck_s, simulate_step
from skyctl.planner.hybrid.hybrid_model import AS_MEASURED, TimeScale
from skyctl.planner.hybrid.joint_sum import SumGroup, SumRoutes, layer_groups, loads_of
from skyctl.planner.stage_memory import device_bytes
from skyctl.planner.tie_exchange import tie_exchange_s
from skyctl.records.plan import Prediction, ReplicaPrediction
from skyctl.records.problem import Problem
from skyctl.records.rhythm import AUTO_STEPS, Rhythm
from skyctl.records.sync_format import ROUNDED_FORMATS

SUM_SHARE = 0.1
"""Of a round, what the average may take with ``auto``."""
SCALINGS, ROUNDED_SCALINGS = 2, 5
"""Passes over the weights that an average takes beside the sum: times the samples, and divided by all; in a
format that rounds also less the round's first weights, plus what was lost before, and what is lost now."""
OUTER_PASSES, MOMENTUM_PASSES = 3, 2
"""Passes over the weights that an outer step takes: the difference, the step, and a copy; with momentum also
what adds the difference to it, and it to the difference."""
MEDIAN = 0.5


@dataclass(frozen=True)
class LocalPipeline:
    """One pipeline: its stages, how they run, and its microbatches of a local step."""

    placement: Placement
    execution: StageExecution
    microbatches: int


@dataclass(frozen=True)
class RoundTimes:
    """What a round takes.

    Attributes:
        local_steps: by pipeline.
        round_s: of the median round, the average and the outer step included.
        sync_s: the average's part of it.
    """

    local_steps: tuple[int, ...]
    round_s: float
    sync_s: float


def keeps_start(problem: Problem) -> bool:
    """Whether a stage keeps a copy of the weights that the round began with."""
    rhythm = problem.rhythm
    needed = rhythm.prox_mu > 0 or rhythm.has_outer_step
    return problem.owners is not None or needed or rounds_weights(problem)


def rounds_weights(problem: Problem) -> bool:
    """Whether weights are averaged in a format that rounds them, with error feedback."""
    return problem.sync_format in ROUNDED_FORMATS


def local_problem(problem: Problem) -> Problem:
    """The problem of one local step, as one pipeline's: layers hold what they keep from round to round."""
    keeps_momentum = problem.rhythm.outer_momentum > 0
    copied = float(keeps_start(problem) + keeps_momentum + rounds_weights(problem))
    layers = tuple(
        layer.model_copy(
            update={
                "state_bytes": layer.state_bytes + copied * gradient_bytes(layer),
                "gradient_bytes": gradient_bytes(layer),
            }
        )
        for layer in problem.layers
    )
    update: dict[str, Any] = {"layers": layers, "parallel": "pipeline", "rhythm": Rhythm(), "owners": None}
    update |= {"sync_format": "float32", "recompute": False, "helpers": None}
    return problem.model_copy(update=update)


class RoundModel:
    """One problem of rounds as plain numbers. Read only.

    Raises:
        InputError: the problem's schedule or objective is one of single pipelines.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.base = CostModel(local_problem(problem))
        self.lines = DataModel(self.base.problem)
        self.ids = self.base.ids
        self._sums = SumRoutes(self.lines)
        self._weights = [gradient_bytes(layer) for layer in problem.layers]
        self._sent = [SENT_SHARE[problem.sync_format] * size for size in self._weights]

    def groups(self, pipelines: Sequence[LocalPipeline]) -> list[SumGroup]:
        """The ranges of layers that the same devices hold, and the fastest ring or star of each."""
        if len(pipelines) < 2:
            return []
        found = []
        for start, stop, holders in layer_groups([one.placement for one in pipelines]):
            size = math.fsum(self._sent[start:stop])
            found.append(SumGroup(start, stop, holders, size, self._sums.fastest(holders, size)))
        return found

    def routed(
        self, start: int, stop: int, holders: tuple[int, ...], routes: Sequence[DeviceRoute]
    ) -> SumGroup:
        """A group with the routes that a plan's record has."""
        size = math.fsum(self._sent[start:stop])
        return SumGroup(start, stop, holders, size, self._sums.of(routes))

    def step_s(self, pipeline: LocalPipeline) -> float:
        """Seconds of one local step."""
        costs = self.base.with_microbatches(pipeline.microbatches)
        found = simulate_step(costs, pipeline.placement, pipeline.execution).iteration_s
        return found + self.added_s(pipeline)

    def added_s(self, pipeline: LocalPipeline) -> float:
        """Seconds of a local step that its simulation leaves out: the sums of ties that the pipeline divides
        (as only one alone does), and FedProx's term."""
        exchange_s = tie_exchange_s(self.base, pipeline.placement)
        if self.problem.rhythm.prox_mu <= 0:
            return exchange_s
        return exchange_s + max(2 * self._pass_s(*stage) for stage in pipeline.placement)

    def times(
        self,
        pipelines: Sequence[LocalPipeline],
        groups: Sequence[SumGroup],
        steps: Sequence[int] | None = None,
        step_s: Sequence[float] | None = None,
        scale: TimeScale = AS_MEASURED,
    ) -> RoundTimes:
        """What a round takes.

        Args:
            steps: by pipeline, its local steps; None: as the problem asks for.
            step_s: by pipeline, the seconds of one; None: ``step_s`` of each.
            scale: of what the average takes.
        """
        step_s = [self.step_s(one) for one in pipelines] if step_s is None else step_s
        sync_s = self._sync_s(pipelines, groups, scale)
        steps = self._steps(step_s, sync_s) if steps is None else steps
        limit_s = self.problem.rhythm.round_deadline_s
        work_s = []
        for count, each_s in zip(steps, step_s, strict=True):
            made = count
            if limit_s is not None and count * each_s > limit_s:  # a whole number of steps is just in time
                made = max(1, math.ceil(limit_s / each_s * (1 - 1e-9)))
            work_s.append(made * each_s)
        slowest_s = median_slowest_s(work_s, self.problem.rhythm.clients_per_round)
        return RoundTimes(tuple(steps), slowest_s + sync_s + self._outer_s(pipelines, scale), sync_s)

    def prediction(
        self, pipelines: Sequence[LocalPipeline], groups: Sequence[SumGroup], times: RoundTimes
    ) -> Prediction:
        """As a plan's record has it."""
        children: dict[int, int] = {}
        for group in groups:
            for device, count in group.routed.use.children.items():
                children[device] = children.get(device, 0) + count
        replicas = []
        slowest_s = 0.0
        for pipeline, steps in zip(pipelines, times.local_steps, strict=True):
            costs = self.base.with_microbatches(pipeline.microbatches)
            played = simulate_step(costs, pipeline.placement, pipeline.execution)
            slowest_s = max(slowest_s, bottleneck_s(costs, pipeline.placement))
            columns = zip(pipeline.placement, played.compute_s, pipeline.execution.in_flight, strict=True)
            for (d, start, stop), compute_s, in_flight in columns:
                need = device_bytes(costs.problem, self.problem.devices[d], start, stop, in_flight)
                busy_s = steps * compute_s
                replicas.append(
                    ReplicaPrediction(
                        device=self.ids[d],
                        compute_s=busy_s,
                        idle_s=max(0.0, times.round_s - busy_s),
                        memory_bytes=need + buffer_bytes(children.get(d, 0)),
                    )
                )
        return Prediction(
            iteration_s=times.round_s,
            bottleneck_s=slowest_s,
            sync_s=times.sync_s,
            replicas=tuple(replicas),
        )

    def _outer_s(self, pipelines: Sequence[LocalPipeline], scale: TimeScale) -> float:
        """Seconds of the outer step, which every holder makes after the average."""
        rhythm = self.problem.rhythm
        if not rhythm.has_outer_step:
            return 0.0
        passes = OUTER_PASSES + MOMENTUM_PASSES * (rhythm.outer_momentum > 0)
        held = (stage for one in pipelines for stage in one.placement)
        return max(passes * scale.device(stage.device) * self._pass_s(*stage) for stage in held)

    def _pass_s(self, device: int, start: int, stop: int) -> float:
        """Seconds of a device to go over its weights once, as when it adds what it has received."""
        return self.problem.devices[device].reduce_byte_s * math.fsum(self._weights[start:stop])

    def _sync_s(
        self, pipelines: Sequence[LocalPipeline], groups: Sequence[SumGroup], scale: TimeScale
    ) -> float:
        """Seconds of the average: the busiest line or processor, the longest way, and what scaling takes."""
        if not groups:
            return 0.0
        lines: dict[Hashable, float] = {}
        for group in groups:
            for what, byte_s in loads_of(self.lines, group.routed.use, scale.link):
                lines[what] = lines.get(what, 0.0) + group.size_bytes * byte_s
        held = [stage for one in pipelines for stage in one.placement]
        busy = [
            scale.device(d)
            * math.fsum(
                group.size_bytes * processor_byte_s(self.lines, group.routed.use, d)
                for group in groups
                if start <= group.start < stop
            )
            for d, start, stop in held
        ]
        rounded = rounds_weights(self.problem)
        passes = (ROUNDED_SCALINGS if rounded else SCALINGS) + keeps_start(self.problem)
        scaled_s = max(passes * scale.device(stage.device) * self._pass_s(*stage) for stage in held)
        latency_s = (1 + rounded) * max(group.routed.use.latency_s for group in groups)
        return max(*lines.values(), *busy, 0.0) + latency_s + scaled_s

    def _steps(self, step_s: Sequence[float], sync_s: float) -> tuple[int, ...]:
        asked = self.problem.rhythm.local_steps
        if isinstance(asked, tuple):
            return asked
        if asked != AUTO_STEPS:
            assert isinstance(asked, int)
            return (asked,) * len(step_s)
        slowest_s = max(step_s)
        if slowest_s <= 0:
            return (1,) * len(step_s)
        level_s = max(1, math.ceil((1 / SUM_SHARE - 1) * sync_s / slowest_s)) * slowest_s
        return tuple(max(1, math.floor(level_s / each_s * (1 + 1e-9))) if each_s else 1 for each_s in step_s)


def median_slowest_s(work_s: Sequence[float], clients: int | None) -> float:
    """The slowest of those that take part, in the median round: all, or so many drawn without replacement."""
    ordered = sorted(work_s)
    count = len(ordered)
    if clients is None or clients >= count:
        return ordered[-1]
    whole = math.comb(count, clients)
    return next(s for i, s in enumerate(ordered, 1) if math.comb(i, clients) >= MEDIAN * whole)
