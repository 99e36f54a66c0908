"""Which experts of a run are on which hosts, and what hosts and ranks are told of each other. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skyctl.compare.number_format import format_seconds
from skyctl.errors import InfeasibleError, InputError, MismatchError, WorkloadError
from skyctl.planner.expert_placement.placement_search import even_placement, place_experts
from skyctl.planner.expert_problem import ExpertDevice, ExpertLoad, ExpertPlacement, PlacementProblem
from skyctl.records.cluster import node_of
from skyctl.records.plan import Plan
from skyctl.records.plan_nodes import nodes_of
from skyctl.records.problem import Problem
from skyctl.schedule.actions import ZERO_BUBBLE

if TYPE_CHECKING:
    from skyctl.workload.workload import Workload

PASSES = 4
"""A token's bytes pass a line so often: there and back, in the forward and in the backward."""


@dataclass(frozen=True)
class ExpertLayer:
    """A layer that is or holds ``Experts``.

    Attributes:
        experts: how many it holds, of all its modules.
        top_k: of how many of them a token is computed, of all its modules.
        part: of the layer's parameters that its largest expert has.
        work: of the layer's computing that its experts do.
    """

    layer: int
    experts: int
    top_k: int
    part: float
    work: float


@dataclass(frozen=True)
class ExpertSetting:
    """Experts are to be on hosts.

    Attributes:
        nodes: that host them, each with all its devices.
    """

    nodes: tuple[str, ...]
    layers: tuple[ExpertLayer, ...]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ExpertSetting:
        """From what ``dataclasses.asdict`` has given. Raises KeyError, TypeError: it has not."""
        return cls(tuple(values["nodes"]), tuple(ExpertLayer(**layer) for layer in values["layers"]))


@dataclass(frozen=True)
class RankExperts:
    """The experts of one rank that are on hosts.

    Attributes:
        hosts: their devices.
        counts: by layer of its own, how many experts it holds.
    """

    hosts: tuple[str, ...]
    counts: Mapping[int, int]


@dataclass(frozen=True)
class ExpertHosting:
    """The experts' places in one attempt.

    Attributes:
        devices: of the hosts, in their order.
        counts: by layer, how many experts it holds.
        holders: by layer, of each expert its host's place; empty in an attempt that is taken over.
        layer_s: by layer, of each host the seconds of a step in which it computes all the layer's tokens.
        room: by layer, of each host how many of the layer's experts have room there.
        byte_s: of each host, the seconds a byte over the slowest line to it.
        time_s: what the slowest hosts take for a microbatch, of all layers together.
        even_s: the same with as many experts on each host; None: these don't fit.
        bound_s: no placement is faster.
    """

    devices: tuple[str, ...]
    counts: Mapping[int, int]
    holders: Mapping[int, tuple[int, ...]]
    layer_s: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    room: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    byte_s: tuple[float, ...] = ()
    time_s: float = 0.0
    even_s: float | None = None
    bound_s: float = 0.0

    @property
    def nodes(self) -> tuple[str, ...]:
        """The hosts' nodes, each once."""
        return tuple(dict.fromkeys(map(node_of, self.devices)))

    def of_layers(self, layers: Collection[int]) -> RankExperts | None:
        """The experts on hosts of a rank with these layers; None: it has none there."""
        counts = {layer: count for layer, count in self.counts.items() if layer in layers}
        return RankExperts(self.devices, counts) if counts else None

    def describe(self, step_s: float) -> str:
        """The placement as a sentence, with what it is predicted to take.

        Args:
            step_s: the predicted step.
        """
        held = [
            sum(place == host for row in self.holders.values() for place in row)
            for host in range(len(self.devices))
        ]
        places = ", ".join(f"{count} on {device}" for count, device in zip(held, self.devices, strict=True))
        even = "does not fit" if self.even_s is None else f"takes {format_seconds(self.even_s)}"
        return (
            f"experts: {places}; the slowest hosts are predicted to take {format_seconds(self.time_s)} for a "
            f"microbatch, no placement less than {format_seconds(self.bound_s)}; an even placement {even}; a "
            f"step is predicted to take {format_seconds(step_s)}"
        )


def expert_setting(workload: Workload, nodes: tuple[str, ...]) -> ExpertSetting | None:
    """That these nodes are to hold the workload's experts; None: no nodes are.

    Raises:
        WorkloadError: no layer is or holds ``Experts``, or some of these can't be on hosts.
    """
    from skyctl.worker.experts.expert_check import check_expert_modules
    from skyctl.worker.experts.held_experts import LayerExperts
    from skyctl.workload.costs import part_of_experts

    if not nodes:
        return None
    check_expert_modules(workload.model.layers, 0, workload.shared_parameters)
    found = []
    for number, module in enumerate(workload.model.layers):
        held = LayerExperts.of(module)
        if not held.modules:
            continue
        sizes = [sum(p.numel() for p in expert.parameters()) for expert in held.experts]
        whole = sum(p.numel() for p in module.parameters())
        top_k = sum(experts.top_k for experts in held.modules)
        work = part_of_experts(workload, number)
        found.append(ExpertLayer(number, len(held.experts), top_k, max(sizes) / max(1, whole), work))
    hub = workload.model.hub
    if not found and hub is not None:
        why = "has no experts" if hub.unfused is None else f"can't have experts elsewhere: {hub.unfused}"
        raise WorkloadError(
            f"--expert-hosts: {workload.spec.source} {why}",
            hint="leave it out: the experts are then where their layers are",
        )
    if not found:
        raise WorkloadError(
            f"--expert-hosts: no layer of {workload.spec.source} is or holds skyctl.Experts",
            hint="leave it out, or make the mixture with skyctl.Experts",
        )
    return ExpertSetting(nodes, tuple(found))


def check_expert_options(*, clip_norm: float | None, elastic: bool, turns: str | None) -> None:
    """Raises InputError where what is asked for can't be done with experts on hosts."""
    _refuse(
        {
            "--elastic": elastic,
            "--turns": turns is not None,
            "--clip-norm": clip_norm is not None,
        }
    )


def check_expert_plan(plan: Plan, setting: ExpertSetting) -> None:
    """Checks that the plan's steps can be made with experts on hosts, and that it knows these.

    Raises:
        InputError: its steps can't be.
        MismatchError: it has no figures of a node.
    """
    rhythm = plan.problem.rhythm
    _refuse(
        {
            "activations that are computed again (recompute)": any(
                stage.recompute for stage in plan.placed_stages
            ),
            f"--schedule {ZERO_BUBBLE} (plan with --schedule 1f1b)": plan.problem.schedule == ZERO_BUBBLE,
            "updates that are late, stale or made in rounds": not rhythm.is_synchronous,
            "data of several owners": plan.problem.owners is not None,
        }
    )
    known = nodes_of(plan.problem)
    for name in setting.nodes:
        if name not in known:
            raise MismatchError(
                f"node {name} is to host experts, and the plan has no figures of it; it has those of "
                f"{', '.join(known)}",
                hint="plan again with that node: skyctl plan WORKLOAD",
            )


def place_hosts(plan: Plan, setting: ExpertSetting, there: Collection[str]) -> ExpertHosting | None:
    """Puts each expert on one device of the nodes that are there, for even loads; None: no node is.

    Layers are placed one after the other, for a microbatch passes them so. An expert's time is its share of
    the experts' part of the layer's, by the plan's figures.

    Raises:
        InfeasibleError, UndecidedError: the experts don't fit.
    """
    problem = plan.problem
    names = [name for name in setting.nodes if name in there]
    devices = [device for device in problem.devices if node_of(device.id) in names]
    if not devices:
        return None
    taken = {replica.device: replica.memory_bytes for replica in plan.predicted.replicas}
    holders: dict[int, tuple[int, ...]] = {}
    time_s = bound_s = 0.0
    even_s: float | None = 0.0
    microbatches = sum(pipeline.microbatches for pipeline in plan.pipelines)
    layer_s: dict[int, tuple[float, ...]] = {}
    for layer in setting.layers:
        state_bytes = _state_bytes(problem, layer)
        loads = [ExpertLoad(f"e{n}", 1 / layer.experts, state_bytes) for n in range(layer.experts)]
        all_bytes = layer.experts * state_bytes
        able = [
            ExpertDevice(
                device.id,
                compute_s=max(layer.work * sum(layer_seconds(problem, device.id, layer.layer)[:2]), 1e-9),
                line_s=_line_s(plan, layer, device.id),
                memory_bytes=_room_bytes(device.memory_bytes, taken.get(device.id, 0.0), all_bytes),
            )
            for device in devices
        ]
        asked = PlacementProblem(loads, able)
        placed = place_experts(asked, copies=1)
        place_of = {device.id: place for place, device in enumerate(devices)}
        holders[layer.layer] = tuple(place_of[next(iter(shares))] for shares in placed.shares)
        time_s, bound_s = time_s + placed.time_s, bound_s + placed.bound_s
        even = _even(asked)
        even_s = None if even is None or even_s is None else even_s + even.time_s
        for place, device in enumerate(able):
            held = holders[layer.layer].count(place)
            taken[device.name] = taken.get(device.name, 0.0) + held * state_bytes
        layer_s[layer.layer] = tuple(device.token_s * microbatches for device in able)
    return ExpertHosting(
        tuple(device.id for device in devices),
        _counts(setting),
        holders,
        layer_s=layer_s,
        room=_room(
            problem,
            setting,
            holders,
            [(device.memory_bytes, taken.get(device.id, 0.0)) for device in devices],
        ),
        byte_s=tuple(max(_byte_s(plan, layer, device.id) for layer in setting.layers) for device in devices),
        time_s=time_s,
        even_s=even_s,
        bound_s=bound_s,
    )


def hosting_again(setting: ExpertSetting, devices: Sequence[str]) -> ExpertHosting | None:
    """That of an attempt which another process has started, as far as it is written down."""
    return ExpertHosting(tuple(devices), _counts(setting), {}) if devices else None


def leading_ranks(layers: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """By rank, those of its layers that no lower rank holds.

    Args:
        layers: by rank, the layers with experts that it holds.
    """
    led: set[int] = set()
    leads = {}
    for rank in sorted(layers):
        leads[rank] = tuple(layer for layer in layers[rank] if layer not in led)
        led |= {*layers[rank]}
    return leads


def _refuse(against: Mapping[str, bool]) -> None:
    found = [what for what, is_there in against.items() if is_there]
    if found:
        raise InputError(
            f"--expert-hosts: experts on other machines can't be trained with {' and '.join(found)}",
            hint="leave that out, or leave the experts where their layers are: without --expert-hosts",
        )


def _counts(setting: ExpertSetting) -> dict[int, int]:
    return {layer.layer: layer.experts for layer in setting.layers}


def layer_seconds(problem: Problem, device: str, layer: int) -> tuple[float, float, float]:
    """A layer's forward and backward of a microbatch, and its update of a step, as the planner has them."""
    times = problem.times.get(device)
    if times is not None:
        return times.forward_s[layer], times.backward_s[layer], times.optimizer_s[layer]
    whole_s = problem.layers[layer].flops / next(d.flops_per_s for d in problem.devices if d.id == device)
    return whole_s / 3, whole_s - whole_s / 3, 0.0


def _line_s(plan: Plan, layer: ExpertLayer, host: str) -> float:
    """Seconds on the slowest line of a rank that holds the layer, for all tokens of a microbatch."""
    return PASSES * layer.top_k * plan.problem.layers[layer.layer].output_bytes * _byte_s(plan, layer, host)


def _byte_s(plan: Plan, layer: ExpertLayer, host: str) -> float:
    """Seconds a byte on that line."""
    problem = plan.problem
    trunk = {stage.device for stage in plan.placed_stages if stage.start <= layer.layer < stage.stop}
    rates = [
        link.bandwidth_bytes_per_s
        for link in problem.links
        if (link.source == host and link.target in trunk) or (link.target == host and link.source in trunk)
    ]
    return 1 / min(rates) if rates else 0.0


def _state_bytes(problem: Problem, layer: ExpertLayer) -> int:
    """The bytes that an expert takes in training."""
    return math.ceil(problem.layers[layer.layer].state_bytes * layer.part)


def _room(
    problem: Problem,
    setting: ExpertSetting,
    holders: Mapping[int, Sequence[int]],
    memory: Sequence[tuple[float | None, float]],
) -> dict[int, tuple[int, ...]]:
    """By layer, how many of its experts each host may hold: what is free there is the layers' in equal parts.

    Args:
        memory: of each host, the bytes that it has, and those taken. None: more than enough.
    """
    return {
        layer.layer: tuple(
            layer.experts
            if has is None
            else holders[layer.layer].count(place)
            + math.floor(max(0.0, has - taken) / len(setting.layers) / max(1, _state_bytes(problem, layer)))
            for place, (has, taken) in enumerate(memory)
        )
        for layer in setting.layers
    }


def _room_bytes(limit: float | None, taken: float, all_bytes: int) -> int:
    """The bytes a device has left for experts, at most what all of them take: solvers want like numbers."""
    return all_bytes if limit is None else min(all_bytes, max(0, math.floor(limit - taken)))


def _even(problem: PlacementProblem) -> ExpertPlacement | None:
    try:
        return even_placement(problem)
    except InfeasibleError:
        return None
