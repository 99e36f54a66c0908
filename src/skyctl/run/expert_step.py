"""The predicted step of a plan whose experts are on hosts. Pure.

A stage's forward is its layers without their experts, and one exchange with all hosts for each layer that has
experts; its backward likewise. A host computes its share of the layer's experts. An exchange has the bytes of
``top_k`` messages to a neighbouring stage, and costs both ends as much. The hosts' updates follow the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyctl.planner.candidate import AS_MEASURED
from skyctl.planner.plan_record import read_candidate
from skyctl.planner.rhythms import StepEnds
from skyctl.planner.step import predict_step, rhythm_of
from skyctl.planner.step_costs import StepCosts
from skyctl.records.pipeline import PlacedStage
from skyctl.records.plan import Plan, Prediction
from skyctl.records.problem import Problem
from skyctl.run.expert_spec import ExpertHosting, ExpertLayer, ExpertSetting, layer_seconds
from skyctl.schedule.hosted_simulation import HostAsk, HostedPass, HostedStage, play_hosted
from skyctl.schedule.simulation_input import SimulationInput


def predict_hosted(
    plan: Plan,
    setting: ExpertSetting,
    hosting: ExpertHosting,
    loads: Mapping[int, Sequence[float]] | None = None,
) -> Prediction:
    """The seconds that a step takes, and that each of the plan's devices computes and waits.

    Hosts count as computing, and waiting for them as the stage's. A device that holds layers and experts is
    taken for two.

    Args:
        loads: by layer, the part of its tokens that each host gets; others, and None: as many to each expert.
    """
    plan = plan.model_copy(update={"problem": _summed_without_experts(plan.problem, setting)})
    costs = StepCosts(plan.problem)
    candidate = read_candidate(costs, plan)
    simulated = [costs.simulated(pipeline) for pipeline in candidate.pipelines]
    view = _Hosts(plan.problem, {layer.layer: layer for layer in setting.layers}, hosting, loads or {})
    stages = [
        [view.stage(simulation, s, stage) for s, stage in enumerate(pipeline.stages)]
        for simulation, pipeline in zip(simulated, plan.pipelines, strict=True)
    ]
    played = play_hosted(simulated, stages, len(hosting.devices))
    updates = [
        [view.update_s(simulation, s, stage) for s, stage in enumerate(pipeline.stages)]
        for simulation, pipeline in zip(simulated, plan.pipelines, strict=True)
    ]
    alone = [StepEnds(ends.ended_s, update_s) for ends, update_s in zip(played, updates, strict=True)]
    step = rhythm_of(plan.problem, candidate)(costs, candidate, alone, AS_MEASURED)
    found = predict_step(costs, step)
    busy = [
        busy_s + update_s
        for ends, own in zip(played, updates, strict=True)
        for busy_s, update_s in zip(ends.busy_s, own, strict=True)
    ]
    replicas = [
        replica.model_copy(
            update={"compute_s": seconds, "idle_s": max(0.0, found.iteration_s - found.sync_s - seconds)}
        )
        for replica, seconds in zip(found.replicas, busy, strict=True)
    ]
    return found.model_copy(update={"replicas": tuple(replicas)})


@dataclass(frozen=True)
class _Hosts:
    problem: Problem
    layers: Mapping[int, ExpertLayer]
    hosting: ExpertHosting
    loads: Mapping[int, Sequence[float]]

    def stage(self, simulation: SimulationInput, place: int, stage: PlacedStage) -> HostedStage:
        """A stage's passes; what is not its layers' comes first in each."""
        times = simulation.stages[place]
        held = [layer for number, layer in self.layers.items() if stage.start <= number < stage.stop]
        return HostedStage(
            self._pass(stage, held, times.forward_s, backward=False),
            self._pass(stage, held[::-1], times.backward_s, backward=True),
        )

    def _pass(
        self, stage: PlacedStage, held: list[ExpertLayer], whole_s: float, *, backward: bool
    ) -> HostedPass:
        """One direction, its layers in the order in which they come."""
        own = {
            number: layer_seconds(self.problem, stage.device, number)[backward]
            for number in range(stage.start, stage.stop)
        }
        for layer in held:
            own[layer.layer] *= 1 - layer.work
        experts_s = sum(
            layer_seconds(self.problem, stage.device, layer.layer)[backward] * layer.work for layer in held
        )
        rest_s = max(0.0, whole_s - experts_s - sum(own.values()))
        work = [rest_s]
        message_s = self._message_s(stage.device)
        for number in sorted(own, reverse=backward):
            if number not in self.layers:
                work[-1] += own[number]
                continue
            # The gate comes before the experts in the forward, and after them in the backward.
            work[-1] += (0.0 if backward else own[number]) + self.layers[number].top_k * message_s
            work.append(own[number] if backward else 0.0)
        asks = tuple(self._asks(stage.device, layer, backward=backward) for layer in held)
        return HostedPass(tuple(work), asks)

    def _asks(self, trunk: str, layer: ExpertLayer, *, backward: bool) -> tuple[HostAsk, ...]:
        asks = []
        held = [self.hosting.holders[layer.layer].count(place) for place in range(len(self.hosting.devices))]
        even = [count / layer.experts for count in held]
        shares = self.loads.get(layer.layer, even)
        for device, (place, share) in zip(self.hosting.devices, enumerate(shares), strict=True):
            if not share:
                continue
            whole_s = layer_seconds(self.problem, device, layer.layer)[backward] * layer.work
            nbytes = share * layer.top_k * self.problem.layers[layer.layer].output_bytes
            way_s = self._way_s(trunk, device, nbytes) + self._way_s(device, trunk, nbytes)
            asks.append(HostAsk(place, share * (whole_s + layer.top_k * self._message_s(device)), way_s))
        return tuple(asks)

    def update_s(self, simulation: SimulationInput, place: int, stage: PlacedStage) -> float:
        """Of the stage's own parameters, then of its experts on the slowest host."""
        held = [layer for number, layer in self.layers.items() if stage.start <= number < stage.stop]
        own_s = simulation.stages[place].optimizer_s
        own_s -= sum(
            layer_seconds(self.problem, stage.device, layer.layer)[2] * layer.part * layer.experts
            for layer in held
        )
        on_hosts = [
            sum(
                layer_seconds(self.problem, device, layer.layer)[2]
                * layer.part
                * self.hosting.holders[layer.layer].count(at)
                for layer in held
            )
            + self._way_s(stage.device, device, 0.0)
            + self._way_s(device, stage.device, 0.0)
            for at, device in enumerate(self.hosting.devices)
            if held
        ]
        return max(0.0, own_s) + max(on_hosts, default=0.0)

    def _message_s(self, device: str) -> float:
        """The seconds that the device spends on a message to a neighbour and one from it."""
        return next(found.neighbour_s for found in self.problem.devices if found.id == device)

    def _way_s(self, source: str, target: str, nbytes: float) -> float:
        """Seconds of a message by itself; none where the problem has no such link."""
        for link in self.problem.links:
            if (link.source, link.target) == (source, target):
                return link.latency_s + nbytes / link.bandwidth_bytes_per_s
        return 0.0


def _summed_without_experts(problem: Problem, setting: ExpertSetting) -> Problem:
    """The problem, with the gradients that pipelines sum: hosts sum those of the experts."""
    layers = list(problem.layers)
    for held in setting.layers:
        layer = layers[held.layer]
        whole = layer.state_bytes / 4 if layer.gradient_bytes is None else layer.gradient_bytes
        left = max(0.0, 1 - held.part * held.experts)
        layers[held.layer] = layer.model_copy(update={"gradient_bytes": whole * left})
    return problem.model_copy(update={"layers": tuple(layers)})
