"""A plan → what each rank is told. Pure: a dry run prints the very objects that a launch sends.

Ranks are counted by pipeline, and within one from the first layers to the last; then come those that hold no
layers and help others to sum gradients.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyctl.errors import InputError, MismatchError
from skyctl.records.cluster import Cluster, Node, split_device_id
from skyctl.records.plan import Plan
from skyctl.records.sync import Route, Sync, SyncGroup
from skyctl.schedule.actions import check_in_flight

TIE_CHUNK_BYTES = 65_536
"""Of the gradients of shared parameters, in a message."""


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


def holding_specs(specs: Sequence[RankSpec]) -> list[RankSpec]:
    """Those that hold layers, which come first."""
    return [spec for spec in specs if not spec.helps]


def sync_pairs(specs: Sequence[RankSpec]) -> list[tuple[int, int]]:
    """The ranks that sum gradients with each other, the lower one of each pair first."""
    return [
        (spec.rank, peer["rank"])
        for spec in specs
        for peer in (spec.payload.get("sync") or {"peers": ()})["peers"]
        if peer["rank"] > spec.rank
    ]


def check_plan_fits(plan: Plan, cluster: Cluster) -> None:
    """Refuses a plan that its schedule or the cluster's devices do not allow.

    Raises:
        InputError: the numbers in flight are not the schedule's, or its form is not launched by this version.
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
    _check_routes(plan)
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
    for rank, (device, structure) in enumerate(zip(devices, structures, strict=True)):
        node_name, local = placed[rank]
        node = cluster.node(node_name)
        sync = structure["sync"]
        if sync is not None:
            sync = {**sync, "peers": [_peer(peer, placed, addresses) for peer in sync["peers"]]}
        payload = {
            "run_id": run_id,
            **structure,
            "device": local,
            "interface": node.interface,
            "steps": steps,
            "previous": None,
            "next": None,
            "sync": sync,
            "trace": trace,
            "facts": True,
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
            "workload": dict(workload[node_name]),
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
            "compare_batches": plan.problem.first_stage is None and plan.problem.last_stage is None,
        }
        ranks.append(RankSpec(rank, node_name, device, payload))
    return ranks


def rank_structures(plan: Plan) -> list[dict[str, Any]]:
    """By rank, the part of its payload that says where it stands among all ranks.

    ``microbatch_range``: the numbers, within the step, of the microbatches that its pipeline computes.
    ``sync``: with whom it sums which layers' gradients, or those of the parameters that layers share
    (``tie``), over which routes (``worker.route_sum.RoutePlace``);
    its ``peers`` are ranks here, and with their addresses in a payload; for a trace it compares its clock
    with that of ``clock_of`` (None: the first rank), and those of ``clock_for`` theirs with its own.
    ``helps``: it holds no layers, and only helps to sum.
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
                }
            )
        first += microbatches
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
            structure["sync"] = _sync(plan, plan.sync, rank)
        _add_clocks([structure["sync"] for structure in found])
    elif len(plan.pipelines) == 1:
        for rank, structure in enumerate(found):
            structure["sync"] = _tie_sync(plan, rank)
    return found


def _microbatches(plan: Plan) -> list[int]:
    """By pipeline, how many of a step's microbatches it computes."""
    if len(plan.pipelines) == 1:
        return [plan.problem.microbatches]
    return [pipeline.microbatches for pipeline in plan.pipelines]


def _sync(plan: Plan, sync: Sync, rank: int) -> dict[str, Any]:
    """What a rank is told of the sums of gradients; see ``rank_structures``."""
    devices = [*(stage.device for stage in plan.placed_stages), *plan.helpers]
    ranks = {device: number for number, device in enumerate(devices)}
    groups: list[dict[str, Any]] = []
    peers: set[int] = set()
    for number, group in enumerate(sync.groups):
        if rank < len(plan.placed_stages):
            here = plan.placed_stages[rank]
            if not (here.start < group.stop and group.start < here.stop):
                continue
        routes = [_route_place(route, route.down, devices[rank], ranks) for route in group.routes]
        for place in routes:
            ends = (place["up_parent"], place["down_parent"], *place["up_children"], *place["down_children"])
            peers.update(end for end in ends if end is not None)
        told = {"number": number, "start": group.start, "stop": group.stop, "routes": routes}
        if plan.helpers:
            down = _agreement_edges(group, plan.helpers)
            told["agreement"] = _route_place(group.routes[0], down, devices[rank], ranks)
        groups.append(told)
    return {
        "format": sync.format,
        "chunk_bytes": sync.chunk_bytes,
        "groups": groups,
        "peers": sorted(peers),
    }


def _route_place(
    route: Route, down: Sequence[Sequence[str]], device: str, ranks: Mapping[str, int]
) -> dict[str, Any]:
    """A device's place on a route, as a ``worker.route_sum.RoutePlace``; ``down``: the edges of that way."""
    up_parent = [ranks[parent] for child, parent in route.up if child == device]
    down_parent = [ranks[parent] for parent, child in down if child == device]
    return {
        "share": route.share,
        "up_children": [ranks[child] for child, parent in route.up if parent == device],
        "up_parent": up_parent[0] if up_parent else None,
        "down_parent": down_parent[0] if down_parent else None,
        "down_children": [ranks[child] for parent, child in down if parent == device],
    }


def _agreement_edges(group: SyncGroup, helpers: Sequence[str]) -> list[tuple[str, str]]:
    """How what ranks agree on comes down the first route, and on to helpers that are not on that way."""
    first = group.routes[0]
    down = [(parent, child) for parent, child in first.down]
    reached = {first.root, *(child for _, child in down)}
    joined = [(a, b) for route in group.routes for edges in (route.up, route.down) for a, b in edges]
    joined += [(b, a) for a, b in joined]
    while left := [(a, b) for a, b in joined if a in reached and b in helpers and b not in reached]:
        down.append(left[0])
        reached.add(left[0][1])
    return down


def _add_clocks(syncs: Sequence[dict[str, Any]]) -> None:
    """Adds ``clock_of`` and ``clock_for`` (``rank_structures``): the fewest comparisons to the first rank."""
    for sync in syncs:
        sync |= {"clock_of": None, "clock_for": []}
    reached = [0]
    for rank in reached:  # grows
        for peer in syncs[rank]["peers"]:
            if peer not in reached:
                reached.append(peer)
                syncs[rank]["clock_for"].append(peer)
                syncs[peer]["clock_of"] = rank


def clock_references(specs: Sequence[RankSpec]) -> list[int | None]:
    """By rank, the one with whose clock it compares its own in a trace; None: the first rank."""
    found: list[int | None] = []
    for spec in specs:
        previous, sync = spec.payload["previous"], spec.payload["sync"] or {}
        found.append(sync.get("clock_of") if previous is None else int(previous["rank"]))
    return found


def _tie_sync(plan: Plan, rank: int) -> dict[str, Any] | None:
    """What a rank is told of parameters of which it and other stages hold copies; None: it has none.

    A star: the first holder adds up all holders' gradients, in the order of their stages, and sends the sum.
    """
    groups: list[dict[str, Any]] = []
    peers: set[int] = set()
    for number, tie in enumerate(plan.problem.ties):
        holders = [
            holder
            for holder, stage in enumerate(plan.placed_stages)
            if any(stage.start <= layer < stage.stop for layer in tie.layers)
        ]
        if len(holders) < 2 or rank not in holders:
            continue
        root, *others = holders
        children, parent = (others, None) if rank == root else ([], root)
        peers.update(children if parent is None else [parent])
        route = {
            "share": 1.0,
            "up_children": children,
            "up_parent": parent,
            "down_parent": parent,
            "down_children": children,
        }
        groups.append({"number": number, "tie": list(tie.layers), "routes": [route]})
    if not groups:
        return None
    return {"format": "float32", "chunk_bytes": TIE_CHUNK_BYTES, "groups": groups, "peers": sorted(peers)}


def _check_routes(plan: Plan) -> None:
    """Raises InputError where a plan of several pipelines asks for what this version does not run."""
    if len(plan.pipelines) == 1:
        return
    if long := [number for number, pipeline in enumerate(plan.pipelines) if len(pipeline.stages) > 1]:
        raise InputError(
            f"pipeline {long[0]} has {len(plan.pipelines[long[0]].stages)} stages; this skyctl launches "
            "several pipelines of one stage each, or one of several"
        )


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
