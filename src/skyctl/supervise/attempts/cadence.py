"""How often a run writes a checkpoint where the user does not say. Pure."""

from __future__ import annotations

import math

from skyctl.records.plan import Plan
from skyctl.supervise.attempts.replanning import node_of

SHARE = 0.02
"""Of the training time that checkpoints may take."""
LONGEST_S = 300.0
"""So much work may be lost at most: this goes before the share."""
WRITE_BYTES_PER_S = 150e6
LAYER_S = 0.01
"""What a layer's file costs beside its bytes: synchronised, renamed."""
LINK_SHARE = 0.25
"""Of a node's slowest link that its copies may take."""


def every(plan: Plan, replicas: int) -> int:
    """Steps from one checkpoint to the next.

    Args:
        replicas: other nodes that get a copy of each.
    """
    problem, step_s = plan.problem, max(plan.predicted.iteration_s, 1e-6)
    state = [
        sum(layer.state_bytes for layer in problem.layers[stage.start : stage.stop]) for stage in plan.stages
    ]
    files = [LAYER_S * (stage.stop - stage.start) for stage in plan.stages]
    wait_s = max(size / WRITE_BYTES_PER_S + more for size, more in zip(state, files, strict=True)) / SHARE
    for stage, size in zip(plan.stages, state, strict=True):
        node = node_of(stage.replicas[0].device)
        rates = [
            link.bandwidth_bytes_per_s
            for link in problem.links
            if node_of(link.source) == node != node_of(link.target)
        ]
        if rates and replicas:
            wait_s = max(wait_s, replicas * size / min(rates) / LINK_SHARE)
    return max(1, math.floor(min(wait_s, LONGEST_S) / step_s))
