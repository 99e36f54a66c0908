"""How others split layers over unequal devices, written anew from their published descriptions.

Each baseline is a function from a problem to an assignment, which ``skyctl.plan(problem, assign=…)`` judges.
None of them looks at links, pins, activations in flight or receive windows; they keep the inventory's order.
"""

from __future__ import annotations

from collections.abc import Callable

from baselines.common import Assignment
from baselines.deepspeed import balanced_parts
from baselines.metis import capacity_slices
from baselines.sky import two_stages
from baselines.weights import even, ram_proportional, speed_proportional
from skyctl.records.problem import Problem

Baseline = Callable[[Problem], Assignment]

BASELINES: dict[str, Baseline] = {
    "even": even,
    "RAM-proportional (exo)": ram_proportional,
    "speed-proportional (Parallax's style)": speed_proportional,
    "partition_balanced (DeepSpeed)": balanced_parts,
    "two-stage heuristic (Sky Computing)": two_stages,
    "layer balancer (Metis)": capacity_slices,
}

__all__ = ["BASELINES", "Assignment", "Baseline"]
