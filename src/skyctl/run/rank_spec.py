"""A plan → what each rank is told. Pure: a dry run prints the very objects that a launch sends.

Ranks are counted by pipeline, and within one from the first layers to the last; then come those that hold no
layers and help others to sum gradients.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyctl.control.backend_choice import backend_of
from skyctl.errors import InputError, MismatchError
from skyctl.records.backend import GLOO
from skyctl.records.cluster import Cluster, Node, split_device_id
from skyctl.records.plan import Plan
from skyctl.run.replica_spec import replica_structures
from skyctl.run.round_spec import check_rounds, compares_batches, round_structure, with_owner
from skyctl.run.sum_spec import add_clocks, check_sums, equal_ring, group_sums, stale_patience, tie_sums
from skyctl.schedule.actions import check_in_flight


@dataclass(frozen=True)
class RankSpec:
    """One process: its rank, where it runs, and the payload its task gets (``worker/rank.py``).

    ``shard_limits``: by layer of its own, the most bytes that a file with its state may have.
    ``summed_numels``: of the gradients of each layer, the last one first, as the plan has them; None: it does
    not say.
    """

    rank: int
    node: str
    device: str
    payload: dict[str, Any]
    shard_limits: Mapping[int, int] = field(default_factory=dict)
    summed_numels: tuple[int, ...] | None = None

    @property
    def helps(self) -> bool:
        """Whether it holds no layers, and only helps others to sum."""
        return bool(self.payload.get("helps"))


def rank_task_name(rank: int) -> str:
    """What the task of a rank is called on its node."""
    return f"rank-{rank}"


def rank_of_task(name: str) -> int | None:
    """The rank whose task is called so; None for a task that is no rank."""
    kind, _, number = name.partition("-")
    return int(number) if kind == "rank" and re.fullmatch("[0-9]{1,8}", number) else None


def last_ranks(specs: Sequence[RankSpec]) -> tuple[int, ...]:
    """Of each pipeline, the rank of its last stage."""
    holding = holding_specs(specs)
    count = len(holding)
    stages = [(spec.payload.get("stage", spec.rank), spec.payload.get("stages", count)) for spec in holding]
    return tuple(spec.rank for spec, (stage, last) in zip(holding, stages, strict=True) if stage + 1 == last)


def owners_of(specs: Sequence[RankSpec]) -> tuple[str, ...]:
    """By pipeline, what its owner is called; empty where data is nobody's alone."""
    told = [specs[rank].payload.get("rounds") or {} for rank in last_ranks(specs)]
    return tuple(str(rounds["owner"]) for rounds in told if rounds.get("owner") is not None)


def holding_specs(specs: Sequence[RankSpec]) -> list[RankSpec]:
    """Those that hold layers, which come first."""
    return [spec for spec in specs if not spec.helps]


def peer_pairs(specs: Sequence[RankSpec]) -> list[tuple[int, int]]:
    """The ranks that exchange tensors with each other, the lower one of each pair first."""
    found: set[tuple[int, int]] = set()
    for spec in specs:
        sync = spec.payload.get("sync") or {"peers": ()}
        for peer in (spec.payload.get("previous"), spec.payload.get("next"), *sync["peers"]):
            if peer is not None:
                found.add((min(spec.rank, peer["rank"]), max(spec.rank, peer["rank"])))
    return sorted(found)


def replica_sets(specs: Sequence[RankSpec]) -> set[tuple[int, ...]]:
    """The sets of ranks that hold the same layers."""
    return {tuple(spec.payload["replicas"]["ranks"]) for spec in holding_specs(specs)}


def check_plan_fits(plan: Plan, cluster: Cluster) -> None:
    """Refuses a plan that its schedule or the cluster's devices do not allow.

    Raises:
        InputError: the numbers in flight are not the schedule's, or its pipelines' sums are not launched by
            this version (``sum_spec.check_sums``).
        MismatchError: names the first device that is not, and the nodes there are.
    """
    for number, (pipeline, microbatches) in enumerate(zip(plan.pipelines, _microbatches(plan), strict=True)):
        in_flight = [stage.in_flight for stage in pipeline.stages]
        deferred = [stage.weights_behind for stage in pipeline.stages]
        fault = check_in_flight(plan.problem.schedule, in_flight, microbatches, deferred)
        if fault is not None:
            where = f"pipeline {number}: " if len(plan.pipelines) > 1 else ""
            raise InputError(
                f"the plan can't be played: {where}{fault}", hint="see what else: skyctl verify PLAN.json"
            )
    check_sums(plan)
    check_rounds(plan)
    names = [node.name for node in cluster.nodes]
    for device in (*(stage.device for stage in plan.placed_stages), *plan.helpers):
        node, local = split_device_id(device)
        if node not in names:
            raise MismatchError(
                f"the plan uses device {device!r}, but cluster {cluster.name!r} has no node "
                f"{node!r}; it has {', '.join(names)}",
                hint="plan again for this cluster: skyctl plan WORKLOAD",
            )
        listed = cluster.node(node).devices
        if listed is not None and local not in {d if ":" in d else f"{d}:0" for d in listed}:
            raise MismatchError(
                f"the plan uses device {device!r}, but cluster {cluster.name!r} lists "
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
    """The ranks of all pipelines, in their order, and then the helpers'.

    Args:
        workload: by node that holds layers, the workload's description with the paths valid on that node.
        recipe: how to train beside that (``workload.recipe.Recipe``, as a dict); None: plainly.
        addresses: by node, the address at which its peers reach it.
    """
    ranks: list[RankSpec] = []
    measured = {machine.device: machine.threads for machine in plan.machines}
    structures = rank_structures(plan)
    devices = [*(stage.device for stage in plan.placed_stages), *plan.helpers]
    placed = [split_device_id(device) for device in devices]
    replicas = replica_structures(plan)
    ring = equal_ring(plan) if backend_of(plan) == GLOO else None
    for rank, (device, structure) in enumerate(zip(devices, structures, strict=True)):
        node_name, local = placed[rank]
        node = cluster.node(node_name)
        sync = structure["sync"]
        if sync is not None:
            sync = {**sync, "peers": [_peer(peer, placed, addresses) for peer in sync["peers"]]}
            sync["groups"] = [{**group, "ring": ring} for group in sync["groups"]]
        payload = {
            "run_id": run_id,
            "ranks": len(devices),
            "backend": backend_of(plan),
            **structure,
            "device": local,
            "interface": node.interface,
            "steps": steps,
            "previous": None,
            "next": None,
            "sync": sync,
            "trace": trace,
            "facts": True,
            **stale_patience(plan, steps),
        }
        if structure.get("helps"):
            payload["figures_every"] = [(recipe or {}).get("validate_every")]
            ranks.append(RankSpec(rank, node_name, device, payload))
            continue
        stage = plan.placed_stages[rank]
        is_first, is_last = structure["stage"] == 0, structure["stage"] + 1 == structure["stages"]
        payload |= {
            "threads": node.threads or measured.get(device),
            "slowdown": node.slowdown,
            "workload": with_owner(workload[node_name], structure),
            "schedule": plan.problem.schedule,
            "in_flight": stage.in_flight,
            "recompute": stage.recompute,
            "weights_behind": stage.weights_behind,
            "receive_window": plan.problem.receive_window,
            "previous": None if is_first else _peer(rank - 1, placed, addresses),
            "next": None if is_last else _peer(rank + 1, placed, addresses),
            "weights": weights and structure["pipeline"] == 0,
            "recipe": dict(recipe or {}),
            "link_dtypes": _link_dtypes(plan, rank, is_first=is_first, is_last=is_last),
            "compare_batches": compares_batches(plan),
            "replicas": {**replicas[rank], "address": addresses[node_name]},
        }
        ranks.append(RankSpec(rank, node_name, device, payload))
    return ranks


def rank_structures(plan: Plan) -> list[dict[str, Any]]:
    """By rank, the part of its payload that says where it stands among all ranks.

    ``microbatch_range``: the numbers, within the step, of the microbatches that its pipeline computes.
    ``sync``: with whom it sums which layers' gradients, or those of the parameters that layers share
    (``tie``), over which routes (``worker.route_sum.RoutePlace``);
    its ``peers`` are ranks here, and with their addresses in a payload; for a trace a rank that no stage of
    its pipeline comes before compares its clock with that of ``clock_of`` (None: the first rank), and those
    of ``clock_for`` theirs with its own. In a payload, a group has a ``ring``, too: the ranks in the order in
    which the backend's own collective sums, in the place of the routes (None: nothing does).
    ``helps``: it holds no layers, and only helps to sum. ``rounds``: see ``round_spec``.
    """
    found: list[dict[str, Any]] = []
    first = 0
    for number, (pipeline, microbatches) in enumerate(zip(plan.pipelines, _microbatches(plan), strict=True)):
        for index, stage in enumerate(pipeline.stages):
            found.append(
                {
                    "rank": len(found),
                    "pipeline": number,
                    "stage": index,
                    "stages": len(pipeline.stages),
                    "layers": [stage.start, stage.stop],
                    "microbatches": plan.problem.microbatches,
                    "microbatch_range": [first, first + microbatches],
                    "sync": None,
                    **round_structure(plan, number),
                }
            )
        first += microbatches if plan.problem.owners is None else 0
    if plan.sync is not None and len(plan.pipelines) > 1:
        found += [
            {
                "rank": len(found) + number,
                "helps": True,
                "pipeline": None,
                "layers": [0, 0],
                "microbatches": plan.problem.microbatches,
                "sync": None,
            }
            for number in range(len(plan.helpers))
        ]
        for rank, structure in enumerate(found):
            structure["sync"] = group_sums(plan, plan.sync, rank)
        add_clocks(found)
    elif len(plan.pipelines) == 1:
        for rank, structure in enumerate(found):
            structure["sync"] = tie_sums(plan, rank)
    return found


def _microbatches(plan: Plan) -> list[int]:
    """By pipeline, how many of a step's microbatches it computes."""
    if len(plan.pipelines) == 1:
        return [plan.problem.microbatches]
    return [pipeline.microbatches for pipeline in plan.pipelines]


def clock_references(specs: Sequence[RankSpec]) -> list[int | None]:
    """By rank, the one with whose clock it compares its own in a trace; None: the first rank."""
    found: list[int | None] = []
    for spec in specs:
        sync = spec.payload["sync"] or {}
        found.append(spec.rank - 1 if spec.payload.get("stage") else sync.get("clock_of"))
    return found


def _peer(rank: int, placed: list[tuple[str, str]], addresses: Mapping[str, str]) -> dict[str, Any]:
    node, local = placed[rank]
    return {"rank": rank, "host": addresses[node], "device": local}


def _link_dtypes(plan: Plan, rank: int, *, is_first: bool, is_last: bool) -> dict[str, str | None]:
    """What each of a stage's four streams is sent as (None: as it is); both ends read the same link."""
    links = {(link.source, link.target): link.dtype for link in plan.problem.links}
    devices = [stage.device for stage in plan.placed_stages]
    here = devices[rank]
    before = "" if is_first else devices[rank - 1]
    after = "" if is_last else devices[rank + 1]
    return {
        "to_next": links.get((here, after)),
        "from_next": links.get((after, here)),
        "to_previous": links.get((here, before)),
        "from_previous": links.get((before, here)),
    }


def used_nodes(plan: Plan, cluster: Cluster) -> list[Node]:
    """The nodes that hold a stage or help to sum, in inventory order."""
    devices = (*(stage.device for stage in plan.placed_stages), *plan.helpers)
    names = {split_device_id(device)[0] for device in devices}
    return [node for node in cluster.nodes if node.name in names]
