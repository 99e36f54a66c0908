"""What ranks are told of the sums they make: of which layers' gradients, and over which routes. Pure.

Pipelines side by side sum group by group (``records.sync``). Two ranks may be in different sets of groups, so
the tags of a group's messages follow from its place in the plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from skyctl.errors import InputError
from skyctl.records.plan import Plan
from skyctl.records.sync import Route, Sync, SyncGroup
from skyctl.records.sync_format import powersgd_rank
from skyctl.run.round_spec import LEAST_WAIT_S, PATIENCE
from skyctl.schedule.actions import ZERO_BUBBLE

TIE_CHUNK_BYTES = 65_536
"""Of the gradients of shared parameters, in a message."""
MOST_WAIT_S = 1e6
"""Longer than any run's rank waits for a peer."""


def check_sums(plan: Plan) -> None:
    """Raises InputError where the sums of several pipelines are not launched by this version."""
    if len(plan.pipelines) == 1 or plan.sync is None:
        return
    groups, schedule = plan.sync.groups, plan.problem.schedule
    if plan.problem.rhythm.is_stale:
        _check_server(plan, plan.sync)
    if len(groups) > 1 and plan.sync.format == "fixed32":
        raise InputError(
            f"the plan sums {len(groups)} groups of layers as fixed32, and groups that are summed apart "
            "can't make a step again together",
            hint="plan with --sync-format float32, or with --parallel data",
        )
    if plan.problem.rhythm.delay and plan.sync.format == "fixed32":
        raise InputError(
            "the plan sums as fixed32, which may have to make a step again, and with a delay the next one is "
            "done by then",
            hint="plan with --sync-format float32, or without --sync-delay",
        )
    if not plan.problem.rhythm.is_synchronous and powersgd_rank(plan.sync.format) is not None:
        raise InputError(
            f"the plan sums as {plan.sync.format}, which goes with a synchronous rhythm only",
            hint="plan with --sync-format float32, or without --sync-delay, --staleness and --local-steps",
        )
    if any(len(pipeline.stages) > 1 for pipeline in plan.pipelines) and schedule == ZERO_BUBBLE:
        raise InputError(
            f"pipelines side by side do not run under {schedule}, which ends a step without a last backward",
            hint="plan with --schedule 1f1b",
        )
    for number, pipeline in enumerate(plan.pipelines):
        for tie in plan.problem.ties:
            holding = [s for s in pipeline.stages if any(s.start <= layer < s.stop for layer in tie.layers)]
            if len(holding) > 1:
                layers = ", ".join(map(str, tie.layers))
                raise InputError(
                    f"pipeline {number} cuts between layers {layers}, which share parameters; with several "
                    "pipelines one stage holds all of them",
                    hint="move the cut, or plan with --parallel pipeline",
                )
    for group in groups if len(groups) > 1 else ():
        holders = {s.device for s in plan.placed_stages if s.start < group.stop and group.start < s.stop}
        for route in group.routes:
            there = {route.root, *(device for edge in (*route.up, *route.down) for device in edge)}
            if others := sorted(there - holders):
                raise InputError(
                    f"a route of layers {group.start}–{group.stop} goes over {others[0]}, which does not "
                    "hold them; of several groups of layers each is summed by those that hold it alone",
                    hint="plan again without helpers",
                )


def _check_server(plan: Plan, sync: Sync) -> None:
    """Raises InputError where a plan with a parameter server is not a star at the first pipeline's device."""
    first, *others = [pipeline.stages[0].device for pipeline in plan.pipelines]
    fault: str | None = None
    routes = [route for group in sync.groups for route in group.routes]
    if [route.root for route in routes] != [first]:
        fault = (
            f"the first pipeline's device, {first}, is to hold the weights for all, and the plan's routes "
        )
        fault += "have other roots"
    elif any(len(pipeline.stages) > 1 for pipeline in plan.pipelines):
        fault = f"{first} is to hold the weights for devices that hold all layers, and the plan cuts these"
    elif {*routes[0].up} != {(one, first) for one in others} or {*routes[0].down} != {
        (first, one) for one in others
    }:
        fault = f"each device is to push to {first} itself, and the plan's route goes another way"
    elif sync.format != "float32":
        fault = f"with --staleness gradients and weights travel as float32, and the plan has {sync.format}"
    if fault is not None:
        raise InputError(fault, hint="plan it again with --staleness")


def stale_patience(plan: Plan, steps: int) -> dict[str, float]:
    """``timeout_s`` of the payloads with a parameter server; nothing without.

    Where all meet, a rank waits for all the steps that the slowest is behind. Who does not answer is found by
    the supervisor, long before.
    """
    rhythm = plan.problem.rhythm
    if not rhythm.is_stale:
        return {}
    behind = steps if rhythm.staleness is None else min(steps, rhythm.staleness + 1)
    return {"timeout_s": min(MOST_WAIT_S, max(LEAST_WAIT_S, PATIENCE * behind * plan.predicted.iteration_s))}


def group_sums(plan: Plan, sync: Sync, rank: int) -> dict[str, Any]:
    """What a rank is told of the sums of its layers' gradients; see ``rank_structures``."""
    devices = [*(stage.device for stage in plan.placed_stages), *plan.helpers]
    ranks = {device: number for number, device in enumerate(devices)}
    groups: list[dict[str, Any]] = []
    peers: set[int] = set()
    next_tag = 0
    for number, group in enumerate(sync.groups):
        first_tag, next_tag = next_tag, next_tag + 2 + 2 * len(group.routes)
        if rank < len(plan.placed_stages):
            here = plan.placed_stages[rank]
            if not (here.start < group.stop and group.start < here.stop):
                continue
        routes = [_route_place(route, route.down, devices[rank], ranks) for route in group.routes]
        for place in routes:
            ends = (place["up_parent"], place["down_parent"], *place["up_children"], *place["down_children"])
            peers.update(end for end in ends if end is not None)
        told = {"number": number, "start": group.start, "stop": group.stop, "routes": routes}
        told["first_tag"] = first_tag
        if plan.helpers:
            down = _agreement_edges(group, plan.helpers)
            told["agreement"] = _route_place(group.routes[0], down, devices[rank], ranks)
        groups.append(told)
    rhythm = plan.problem.rhythm
    delayed = {"delay": rhythm.delay, "undelayed_steps": rhythm.undelayed_steps} if rhythm.delay else {}
    return {
        "format": sync.format,
        "chunk_bytes": sync.chunk_bytes,
        "uncompressed_steps": sync.uncompressed_steps,
        "groups": groups,
        "peers": sorted(peers),
        **delayed,
        **({"staleness": {"most": rhythm.staleness}} if rhythm.is_stale else {}),
    }


def equal_ring(plan: Plan) -> list[int] | None:
    """The ranks in their order on the ring over which all sum equal shares; None: the plan has another way.

    Such a sum is what libraries of collectives have too, and theirs takes less of the processors.
    """
    sync, devices = plan.sync, [stage.device for stage in plan.placed_stages]
    if sync is None or len(sync.groups) != 1 or plan.helpers or len(devices) != len(plan.pipelines):
        return None
    if sync.format != "float32" or not plan.problem.rhythm.is_synchronous:
        return None
    routes = sync.groups[0].routes
    edges = {(a, b) for route in routes for a, b in (*route.up, *route.down)}
    following = dict(edges)
    order = [devices[0]]
    while len(following) == len(edges) and len(order) < len(devices) and order[-1] in following:
        order.append(following[order[-1]])
    is_ring = set(order) == set(devices) and following.get(order[-1]) == order[0]
    is_equal = all(math.isclose(route.share, 1 / len(devices), rel_tol=1e-6) for route in routes)
    roots = {route.root for route in routes}
    if not (is_ring and is_equal and roots == set(devices) and len(routes) == len(devices)):
        return None
    return [devices.index(device) for device in order]


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


def add_clocks(structures: Sequence[dict[str, Any]]) -> None:
    """Adds ``clock_of`` and ``clock_for`` to the ranks' ``sync``: the fewest comparisons to the first rank.

    Within a pipeline every stage compares its clock with that of the one before it, so only first stages (and
    helpers) have a ``clock_of``.
    """
    pipelines: dict[int, list[int]] = {}
    for rank, structure in enumerate(structures):
        structure["sync"] |= {"clock_of": None, "clock_for": []}
        if structure["pipeline"] is not None:
            pipelines.setdefault(structure["pipeline"], []).append(rank)
    reached = list(pipelines[0])
    for rank in reached:  # grows
        for peer in structures[rank]["sync"]["peers"]:
            if peer not in reached and not structures[peer].get("stage"):
                pipeline = structures[peer]["pipeline"]
                reached += [peer] if pipeline is None else pipelines[pipeline]
                structures[rank]["sync"]["clock_for"].append(peer)
                structures[peer]["sync"]["clock_of"] = rank


def tie_sums(plan: Plan, rank: int) -> dict[str, Any] | None:
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
        groups.append({"number": number, "tie": list(tie.layers), "routes": [route], "first_tag": 4 * number})
    if not groups:
        return None
    return {"format": "float32", "chunk_bytes": TIE_CHUNK_BYTES, "groups": groups, "peers": sorted(peers)}
