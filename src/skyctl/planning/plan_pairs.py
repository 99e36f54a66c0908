"""The pairs of devices that a plan sends over: which could not be connected, and which have no link."""

from __future__ import annotations

from itertools import pairwise

from skyctl.errors import InfeasibleError, UndecidedError
from skyctl.learning.problem_from_profile import BROKEN_LATENCY_S
from skyctl.records.cluster import split_device_id
from skyctl.records.plan import Plan


def _connected_pairs(plan: Plan) -> list[tuple[str, str]]:
    """The directed pairs that a plan sends over: between neighbouring stages, and along its routes."""
    pairs = [
        pair
        for pipeline in plan.pipelines
        for a, b in pairwise(stage.device for stage in pipeline.stages)
        for pair in ((a, b), (b, a))
    ]
    for group in plan.sync.groups if plan.sync is not None else ():
        pairs += [(a, b) for route in group.routes for edges in (route.up, route.down) for a, b in edges]
    return list(dict.fromkeys(pairs))


def refuse_broken_pairs(plan: Plan) -> None:
    """Raises where a plan sends over a pair that could not be connected."""
    dead = {(k.source, k.target) for k in plan.problem.links if k.latency_s >= BROKEN_LATENCY_S}
    for here, there in _connected_pairs(plan):
        if (here, there) in dead or (there, here) in dead:
            # Only a search that weighed links has shown that no order avoids the pair.
            proved = plan.strategy in ("even", "assigned") or (
                plan.problem.objective == "iteration" and plan.certificate.status == "optimal"
            )
            raise (InfeasibleError if proved else UndecidedError)(
                f"the {plan.strategy} plan needs a connection {here} ↔ {there}, "
                "and that pair could not be connected",
                hint="see why: skyctl check; a VPN's interface is named with `interface:` in cluster.yaml",
            )


def unlinked_pairs(plan: Plan) -> list[tuple[str, str]]:
    """Pairs of devices the plan sends over without a given link or shared resource, where others have one.

    Devices of one node count as linked.
    """
    problem = plan.problem
    given = {(link.source, link.target) for link in problem.links}
    given |= {(pair[0], pair[1]) for resource in problem.shared for pair in resource.links}
    if not given:
        return []
    return [(a, b) for a, b in _connected_pairs(plan) if (a, b) not in given and not _same_node(a, b)]


def _same_node(a: str, b: str) -> bool:
    node, _ = split_device_id(a)
    return node != "" and node == split_device_id(b)[0]
