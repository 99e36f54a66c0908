"""The time that stages with copies of shared parameters take to sum their gradients, as a step ends."""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.errors import InputError
from skyctl.planner.cost_model import CostModel, StageAssignment
from skyctl.records.problem import Problem


def require_ties_at_home(problem: Problem) -> None:
    """Raises InputError where pins keep the model's ends on different devices, and these share parameters.

    Gradients show a step's inputs and targets, as an embedding's do, and every plan would exchange them.
    """
    first, last = problem.first_stage, problem.last_stage
    if first is None or last is None or not set(first).isdisjoint(last):
        return
    for tie in problem.ties:
        if tie.layers[0] == 0 and tie.layers[-1] == len(problem.layers) - 1:
            names = [problem.layers[i].name for i in (0, -1)]
            raise InputError(
                f"layers {names[0]} and {names[1]} share parameters, whose gradients show inputs and "
                f"targets; pins keep those on {', '.join(first)} and {', '.join(last)}, and every plan lets "
                "the gradients leave them",
                hint="train two parameters (hf:DIR,untie), or pin both ends to one machine",
            )


def tie_exchange_s(model: CostModel, placement: Sequence[StageAssignment]) -> float:
    """Seconds of all ties' sums, one after the other; 0 where each tie's layers lie in one stage.

    Every replica sends its float32 gradients to the first one, which sends each of them the sum, chunk by
    chunk. Both ways run side by side, so a tie takes its bytes on the slowest link, or on a resource that the
    links share, and one latency up and one down.
    """
    problem = model.problem
    links = {(link.source, link.target): link for link in problem.links}
    total_s = 0.0
    for tie in problem.ties:
        replicas = [
            model.ids[stage.device]
            for stage in placement
            if any(stage.start <= layer < stage.stop for layer in tie.layers)
        ]
        root, *others = replicas
        pairs = {*((other, root) for other in others), *((root, other) for other in others)}
        rates = [1 / links[pair].bandwidth_bytes_per_s for pair in pairs if pair in links]
        rates += [
            len(pairs & {(source, target) for source, target in resource.links})
            / resource.bandwidth_bytes_per_s
            for resource in problem.shared
        ]
        up_s = max((links[o, root].latency_s for o in others if (o, root) in links), default=0.0)
        down_s = max((links[root, o].latency_s for o in others if (root, o) in links), default=0.0)
        total_s += tie.bytes * max(rates, default=0.0) + up_s + down_s
    return total_s
