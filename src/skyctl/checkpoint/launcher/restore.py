"""From which checkpoint a plan can go on: the newest that is whole, its layers where they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from skyctl.checkpoint.launcher.replicator_group import LAUNCHER_COPIES, ReplicatorGroup
from skyctl.checkpoint.node import layout
from skyctl.checkpoint.node.recovery import RestorePoint, newest_restore_point
from skyctl.records.cluster import node_of
from skyctl.records.plan import Plan
from skyctl.records.plan_nodes import layers_by_node
from skyctl.records.problem import Problem


def node_rates(problem: Problem) -> dict[tuple[str, str], float]:
    """Bytes a second between nodes, as the plan has them."""
    rates: dict[tuple[str, str], float] = {}
    for link in problem.links:
        pair = node_of(link.source), node_of(link.target)
        if pair[0] != pair[1]:
            rates[pair] = min(link.bandwidth_bytes_per_s, rates.get(pair, float("inf")))
    return rates


def restore_newest(
    replicators: ReplicatorGroup,
    plan: Plan,
    *,
    done: int,
    here: Path | None = None,
    warn: Callable[[str], None] = lambda _text: None,
) -> RestorePoint | None:
    """The newest step that the plan's nodes can go on from, every file of it verified and in its place.

    Damaged files are named and passed over: another copy is taken, or an older step.

    Args:
        done: steps whose losses are known here; older checkpoints are preferred to ones beyond.
        here: this machine's own copies.

    Returns:
        None: no step is there in full.

    Raises:
        NodeError: one of the plan's nodes can't keep what it is brought; no copy is to blame for that.
    """
    holdings: dict[str, dict[int, dict[int, layout.HeldShard]]] = replicators.holdings(named=True)
    if here is not None:
        holdings[LAUNCHER_COPIES] = layout.held_shards(here, named=True)
    wanted = layers_by_node(plan)
    layers = len(plan.problem.layers)
    while True:
        point = newest_restore_point(holdings, layers, at_most=done) or newest_restore_point(holdings, layers)
        if point is None:
            return None
        for said in point.disagreeing:
            warn(said)
        bad = _unusable_copies(replicators, point, wanted, node_rates(plan.problem), here)
        if not bad:
            steps = {step for by_step in holdings.values() for step in by_step}
            replicators.prune({step for step in steps if step <= point.step})
            return point
        for (node, layer), why in bad.items():
            warn(f"checkpoint of step {point.step}: {_place_name(node)}: {why}; it is passed over")
            holdings[node].get(point.step, {}).pop(layer, None)


def _place_name(node: str) -> str:
    return f"node {node}" if node != LAUNCHER_COPIES else "the copies here"


def _unusable_copies(
    replicators: ReplicatorGroup,
    point: RestorePoint,
    wanted: Mapping[str, set[int]],
    rates: Mapping[tuple[str, str], float],
    here: Path | None,
) -> dict[tuple[str, int], str]:
    """Brings the files together; the copies that could not be used, by node and layer, and why."""
    used = {
        node: {layer for layer in layers if node in point.layers[layer].nodes}
        for node, layers in wanted.items()
    }
    unusable = {
        (node, layer): why
        for node, faults in replicators.damaged(point, used).items()
        for layer, why in faults.items()
    }
    if unusable:
        return unusable
    for faults in replicators.bring(point, wanted, rates, here).values():
        for layer, (source, why) in faults.items():
            unusable[source, layer] = why
    return unusable
