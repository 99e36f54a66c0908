"""The nodes of a plan and of a problem: which there are, which write checkpoints, which layers each holds."""

from __future__ import annotations

from skyctl.records.cluster import node_of
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem


def nodes_in(plan: Plan) -> tuple[str, ...]:
    """The nodes that have a rank: those that hold a stage, in pipeline order, then helpers', each once."""
    devices = [*(stage.device for stage in plan.placed_stages), *plan.helpers]
    return tuple(dict.fromkeys(map(node_of, devices)))


def writers_in(plan: Plan) -> tuple[str, ...]:
    """The nodes whose ranks write checkpoints: those of the first pipeline. Others hold the same layers."""
    return tuple(dict.fromkeys(node_of(stage.device) for stage in plan.pipelines[0].stages))


def nodes_of(problem: Problem) -> tuple[str, ...]:
    """The nodes of the problem's devices, in their order, each once."""
    return tuple(dict.fromkeys(node_of(device.id) for device in problem.devices))


def layers_by_node(plan: Plan) -> dict[str, set[int]]:
    """By node, the layers that its ranks hold."""
    held: dict[str, set[int]] = {}
    for stage in plan.placed_stages:
        held.setdefault(node_of(stage.device), set()).update(range(stage.start, stage.stop))
    return held
