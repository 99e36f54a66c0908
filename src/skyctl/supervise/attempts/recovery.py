"""From which checkpoint a plan can go on: the newest that is whole, its layers where they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from skyctl.checkpoint import layout
from skyctl.checkpoint.choosing import Chosen, newest
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem
from skyctl.supervise.attempts.keepers import HERE, Keepers
from skyctl.supervise.attempts.replanning import node_of


def wanted_by(plan: Plan) -> dict[str, set[int]]:
    """By node, the layers its ranks hold."""
    found: dict[str, set[int]] = {}
    for stage in plan.stages:
        for replica in stage.replicas:
            found.setdefault(node_of(replica.device), set()).update(range(stage.start, stage.stop))
    return found


def rates_of(problem: Problem) -> dict[tuple[str, str], float]:
    """Bytes a second between nodes, as the plan has them."""
    found: dict[tuple[str, str], float] = {}
    for link in problem.links:
        pair = node_of(link.source), node_of(link.target)
        if pair[0] != pair[1]:
            found[pair] = min(link.bandwidth_bytes_per_s, found.get(pair, float("inf")))
    return found


def bring_newest(
    keepers: Keepers,
    plan: Plan,
    *,
    done: int,
    here: Path | None = None,
    warn: Callable[[str], None] = lambda _text: None,
) -> Chosen | None:
    """The newest step that the plan's nodes can go on from, every file of it verified and in its place.

    Damaged files are named and passed over: another copy is taken, or an older step.

    Args:
        done: steps whose losses are known here; older checkpoints are preferred to ones beyond.
        here: this machine's own copies.

    Returns:
        None: no step is there in full.
    """
    holdings: dict[str, dict[int, dict[int, layout.Held]]] = keepers.holdings(named=True)
    if here is not None:
        holdings[HERE] = layout.held(here, named=True)
    wanted = wanted_by(plan)
    layers = len(plan.problem.layers)
    while True:
        chosen = newest(holdings, layers, at_most=done) or newest(holdings, layers)
        if chosen is None:
            return None
        for said in chosen.disagreeing:
            warn(said)
        bad = _spoiled(keepers, chosen, wanted, rates_of(plan.problem), here)
        if not bad:
            steps = {step for by_step in holdings.values() for step in by_step}
            keepers.prune({step for step in steps if step <= chosen.step})
            return chosen
        for (node, layer), why in bad.items():
            warn(f"checkpoint of step {chosen.step}: {_where(node)}: {why}; it is passed over")
            holdings[node].get(chosen.step, {}).pop(layer, None)


def _where(node: str) -> str:
    return f"node {node}" if node != HERE else "the copies here"


def _spoiled(
    keepers: Keepers,
    chosen: Chosen,
    wanted: Mapping[str, set[int]],
    rates: Mapping[tuple[str, str], float],
    here: Path | None,
) -> dict[tuple[str, int], str]:
    """Brings the files together; the copies that could not be used, by node and layer, and why."""
    used = {
        node: {layer for layer in layers if node in chosen.layers[layer].nodes}
        for node, layers in wanted.items()
    }
    found = {
        (node, layer): why
        for node, faults in keepers.damaged(chosen, used).items()
        for layer, why in faults.items()
    }
    if found:
        return found
    for faults in keepers.bring(chosen, wanted, rates, here).values():
        for layer, (source, why) in faults.items():
            found[source, layer] = why
    return found
