"""What stages that hold copies of shared parameters take to sum their gradients, at the end of a step."""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.planner.cost_model import CostModel, StageAssignment


def tie_exchange_s(model: CostModel, placement: Sequence[StageAssignment]) -> float:
    """Seconds of all ties' sums, one after the other; 0 where each tie's layers lie in one stage.

    Every holder sends its gradients, in float32, to the first one, which sends each of them the sum, chunk by
    chunk. Both ways run side by side, so a tie takes its bytes on the slowest link, or on a resource that the
    links share, and one latency up and one down.
    """
    problem = model.problem
    links = {(link.source, link.target): link for link in problem.links}
    total_s = 0.0
    for tie in problem.ties:
        holders = [
            model.ids[stage.device]
            for stage in placement
            if any(stage.start <= layer < stage.stop for layer in tie.layers)
        ]
        root, *others = holders
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
