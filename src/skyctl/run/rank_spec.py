"""A plan → what each rank is told. Pure: a dry run prints the very objects that a launch sends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skyctl.errors import InputError, MismatchError
from skyctl.records.cluster import Cluster, Node, split_device_id
from skyctl.records.plan import Plan
from skyctl.schedule.actions import check_in_flight


@dataclass(frozen=True)
class RankSpec:
    """One process: its rank, where it runs, and the payload its task gets (``worker/rank.py``).

    ``shard_limits``: by layer of its own, the most bytes that a file with its state may have.
    """

    rank: int
    node: str
    device: str
    payload: dict[str, Any]
    shard_limits: Mapping[int, int] = field(default_factory=dict)


def rank_task_name(rank: int) -> str:
    """What the task of a rank is called on its node."""
    return f"rank-{rank}"


def rank_of_task(name: str) -> int | None:
    """The rank whose task is called so; None for a task that is no rank."""
    kind, _, number = name.partition("-")
    return int(number) if kind == "rank" and re.fullmatch("[0-9]{1,8}", number) else None


def check_plan_fits(plan: Plan, cluster: Cluster) -> None:
    """Refuses a plan that its schedule or the cluster's devices do not allow.

    Raises:
        InputError: the numbers in flight are not the schedule's.
        MismatchError: names the first device that is not, and the nodes there are.
    """
    in_flight = [stage.in_flight for stage in plan.placed_stages]
    deferred = [stage.weights_behind for stage in plan.placed_stages]
    fault = check_in_flight(plan.problem.schedule, in_flight, plan.problem.microbatches, deferred)
    if fault is not None:
        raise InputError(f"the plan can't be played: {fault}", hint="see what else: skyctl verify PLAN.json")
    names = [node.name for node in cluster.nodes]
    for stage in plan.placed_stages:
        node, local = split_device_id(stage.device)
        if node not in names:
            raise MismatchError(
                f"the plan uses device {stage.device!r}, but cluster {cluster.name!r} has no node "
                f"{node!r}; it has {', '.join(names)}",
                hint="plan again for this cluster: skyctl plan WORKLOAD",
            )
        listed = cluster.node(node).devices
        if listed is not None and local not in {d if ":" in d else f"{d}:0" for d in listed}:
            raise MismatchError(
                f"the plan uses device {stage.device!r}, but cluster {cluster.name!r} lists "
                f"{', '.join(listed)} for node {node!r}",
                hint="plan again for this cluster: skyctl plan WORKLOAD",
            )


def rank_specs(
    plan: Plan,
    cluster: Cluster,
    *,
    run_id: str,
    steps: int,
    workload: Mapping[str, Mapping[str, Any]],
    addresses: Mapping[str, str],
    weights: bool = True,
    recipe: Mapping[str, Any] | None = None,
    trace: bool = False,
) -> list[RankSpec]:
    """The ranks of a pipeline, in stage order: rank = stage.

    Args:
        workload: by node, the workload's description with the paths valid on that node.
        recipe: how to train beside that (``workload.recipe.Recipe``, as a dict); None: plainly.
        addresses: by node, the address at which its peers reach it.

    Raises:
        InputError: the plan has several pipelines, which this version can't launch.
    """
    if len(plan.pipelines) != 1:
        raise InputError(f"the plan has {len(plan.pipelines)} pipelines; this skyctl launches one")
    ranks: list[RankSpec] = []
    stages = len(plan.placed_stages)
    placed = [split_device_id(stage.device) for stage in plan.placed_stages]
    measured = {machine.device: machine.threads for machine in plan.machines}
    for index, stage in enumerate(plan.placed_stages):
        node_name, local = placed[index]
        node = cluster.node(node_name)
        payload = {
            "run_id": run_id,
            "rank": index,
            "stage": index,
            "stages": stages,
            "device": local,
            "threads": node.threads or measured.get(stage.device),
            "slowdown": node.slowdown,
            "interface": node.interface,
            "workload": dict(workload[node_name]),
            "layers": [stage.start, stage.stop],
            "microbatches": plan.problem.microbatches,
            "schedule": plan.problem.schedule,
            "in_flight": stage.in_flight,
            "recompute": stage.recompute,
            "weights_behind": stage.weights_behind,
            "receive_window": plan.problem.receive_window,
            "steps": steps,
            "previous": _peer(index - 1, placed, addresses) if index else None,
            "next": _peer(index + 1, placed, addresses) if index + 1 < stages else None,
            "weights": weights,
            "recipe": dict(recipe or {}),
            "link_dtypes": _link_dtypes(plan, index),
            "compare_batches": plan.problem.first_stage is None and plan.problem.last_stage is None,
            "trace": trace,
            "facts": True,
        }
        ranks.append(RankSpec(index, node_name, stage.device, payload))
    return ranks


def _peer(rank: int, placed: list[tuple[str, str]], addresses: Mapping[str, str]) -> dict[str, Any]:
    node, local = placed[rank]
    return {"rank": rank, "host": addresses[node], "device": local}


def _link_dtypes(plan: Plan, stage: int) -> dict[str, str | None]:
    """What each of a stage's four streams is sent as (None: as it is); both ends read the same link."""
    links = {(link.source, link.target): link.dtype for link in plan.problem.links}
    devices = [s.device for s in plan.placed_stages]
    here = devices[stage]
    before = devices[stage - 1] if stage else None
    after = devices[stage + 1] if stage + 1 < len(devices) else None
    return {
        "to_next": links.get((here, after or "")),
        "from_next": links.get((after or "", here)),
        "to_previous": links.get((here, before or "")),
        "from_previous": links.get((before or "", here)),
    }


def used_nodes(plan: Plan, cluster: Cluster) -> list[Node]:
    """The nodes that hold a stage, in inventory order."""
    names = {split_device_id(stage.device)[0] for stage in plan.placed_stages}
    return [node for node in cluster.nodes if node.name in names]
