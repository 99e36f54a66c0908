"""What stages that hold copies of shared parameters take to sum their gradients, at the end of a step."""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.planner.cost_model import CostModel, StageAssignment


def tie_exchange_s(model: CostModel, placement: Sequence[StageAssignment]) -> float:
    """Seconds of all ties' sums, one after the other; 0 where each tie's layers lie in one stage.

    Every holder sends its gradients to the first one, which sends each of them the sum, chunk by chunk: both
    ways run side by side, so a tie takes its bytes on the slowest link, or on a resource that its links share,
    and one latency up and one down.
    """
    total_s = 0.0
    for tie in model.problem.ties:
        holders = [s.device for s in placement if any(s.start <= layer < s.stop for layer in tie.layers)]
        if len(holders) < 2:
            continue
        root, *others = holders
        ways = [[model.link_cost(other, root) for other in others], [model.link_cost(root, other) for other in others]]
        rates = [cost.seconds_per_byte for way in ways for cost in way]
        resources: dict[int, float] = {}
        for cost in (cost for way in ways for cost in way):
            for number, rate in cost.shared:
                resources[number] = resources.get(number, 0.0) + rate
        total_s += tie.bytes * max((*rates, *resources.values()))
        total_s += sum(max(cost.latency_s for cost in way) for way in ways)
    return total_s
