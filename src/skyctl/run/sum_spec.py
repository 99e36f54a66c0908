"""The orders of ranks for the sums they make: of which layers' gradients, and over which routes. Pure.

Pipelines side by side sum group by group (``records.sync``). Two ranks may be in different sets of groups, so
the tags of a group's messages follow from its place in the plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from skyctl.errors import InputError
from skyctl.records.plan import Plan
from skyctl.records.sync import Route, Sync, SyncGroup
from skyctl.records.sync_format import powersgd_rank
from skyctl.schedule.actions import ZERO_BUBBLE
from skyctl.worker.elastic.route_trees import place_on
from skyctl.worker.rank_order import RoutePlace, RouteTree, Staleness, SumGroupOrder, SumOrder

TIE_CHUNK_BYTES = 65_536
"""Of the gradients of shared parameters, in a message."""


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
        replicas = {s.device for s in plan.placed_stages if s.start < group.stop and group.start < s.stop}
        for route in group.routes:
            there = {route.root, *(device for edge in (*route.up, *route.down) for device in edge)}
            if others := sorted(there - replicas):
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
    elif {*routes[0].up} != {(device, first) for device in others} or {*routes[0].down} != {
        (first, device) for device in others
    }:
        fault = f"each device is to push to {first} itself, and the plan's route goes another way"
    elif sync.format != "float32":
        fault = f"with --staleness gradients and weights travel as float32, and the plan has {sync.format}"
    if fault is not None:
        raise InputError(fault, hint="plan it again with --staleness")


def rank_sums(plan: Plan) -> list[SumOrder | None]:
    """By rank, those that help after all others, the sums that it takes part in; None: there is none.

    Pipelines side by side sum their layers' gradients (or weights); stages of a single one those of
    parameters that their layers share.
    """
    ranks = range(len(plan.placed_stages) + len(plan.helpers))
    if len(plan.pipelines) == 1:
        return [_tie_sums(plan, rank) for rank in ranks]
    if plan.sync is None:
        return [None for _ in ranks]
    return [_group_sums(plan, plan.sync, rank) for rank in ranks]


def over_ring(sync: SumOrder, ring: tuple[int, ...] | None) -> SumOrder:
    """The same sums, made by the backend's own collective over these ranks; None: by the routes."""
    return replace(sync, groups=tuple(replace(group, ring=ring) for group in sync.groups))


def _group_sums(plan: Plan, sync: Sync, rank: int) -> SumOrder:
    devices = [*(stage.device for stage in plan.placed_stages), *plan.helpers]
    ranks = {device: number for number, device in enumerate(devices)}
    groups: list[SumGroupOrder] = []
    next_tag = 0
    for number, group in enumerate(sync.groups):
        first_tag, next_tag = next_tag, next_tag + 2 + 2 * len(group.routes)
        if rank < len(plan.placed_stages):
            here = plan.placed_stages[rank]
            if not (here.start < group.stop and group.start < here.stop):
                continue
        trees, agreement = [route_tree(route, ranks) for route in group.routes], None
        if plan.helpers:
            down = tuple((ranks[a], ranks[b]) for a, b in _agreement_edges(group, plan.helpers))
            agreement = place_on(replace(trees[0], down=down), rank)
        groups.append(
            SumGroupOrder(
                number=number,
                first_tag=first_tag,
                routes=tuple(place_on(tree, rank) for tree in trees),
                start=group.start,
                stop=group.stop,
                agreement=agreement,
            )
        )
    rhythm = plan.problem.rhythm
    return SumOrder(
        format=sync.format,
        chunk_bytes=sync.chunk_bytes,
        groups=tuple(groups),
        uncompressed_steps=sync.uncompressed_steps,
        delay=bool(rhythm.delay),
        undelayed_steps=rhythm.undelayed_steps,
        staleness=Staleness(rhythm.staleness) if rhythm.is_stale else None,
    )


def equal_ring(plan: Plan) -> tuple[int, ...] | None:
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
    return tuple(devices.index(device) for device in order)


def route_tree(route: Route, ranks: Mapping[str, int]) -> RouteTree:
    """A plan's route as ranks are told of it; ``ranks``: by device."""
    return RouteTree(
        share=route.share,
        root=ranks[route.root],
        up=tuple((ranks[child], ranks[parent]) for child, parent in route.up),
        down=tuple((ranks[parent], ranks[child]) for parent, child in route.down),
    )


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


def clock_references(plan: Plan, sums: Sequence[SumOrder | None]) -> list[int | None]:
    """By rank, the one with whose clock it compares its own: the fewest comparisons to the first rank.

    Every stage compares with the one before it; first stages and helpers with a rank that they sum with.
    None: the first rank.
    """
    references: list[int | None] = []
    pipelines: list[list[int]] = []
    for pipeline in plan.pipelines:
        own = range(len(references), len(references) + len(pipeline.stages))
        pipelines.append(list(own))
        references += [None, *own[:-1]]
    references += [None for _ in plan.helpers]
    together = {own[0]: own for own in pipelines}
    reached = list(pipelines[0])
    for rank in reached:  # grows
        sync = sums[rank]
        for peer in () if sync is None else sync.peers:
            if peer not in reached and references[peer] is None:
                reached += together.get(peer, [peer])
                references[peer] = rank
    return references


def _tie_sums(plan: Plan, rank: int) -> SumOrder | None:
    """The sums of parameters of which this rank and other stages hold copies; None: it has none.

    A star: the first of them adds up the gradients of all, in the order of their stages, and sends the sum.
    """
    groups: list[SumGroupOrder] = []
    for number, tie in enumerate(plan.problem.ties):
        ranks = [
            holding
            for holding, stage in enumerate(plan.placed_stages)
            if any(stage.start <= layer < stage.stop for layer in tie.layers)
        ]
        if len(ranks) < 2 or rank not in ranks:
            continue
        root, *others = ranks
        children, parent = (tuple(others), None) if rank == root else ((), root)
        route = RoutePlace(1.0, children, parent, parent, children)
        groups.append(SumGroupOrder(number, first_tag=4 * number, routes=(route,), tie=tuple(tie.layers)))
    return SumOrder("float32", TIE_CHUNK_BYTES, tuple(groups)) if groups else None
